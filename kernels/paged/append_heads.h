// What a layer does with its projected queries, keys and values before attention: heads are
// normalized where the model does so, rotated to the step's positions where keys are cached
// rotated, and keys and values appended to the layer's pages with their digests. Called by the
// backends; on the CPU a composition of other ops, which is what append_heads_cuda.h is held to.
// Thread-compatible.
//
//   q, k, v = columns of qkv;  q, k = rms_norm(q, q_norm), rms_norm(k, k_norm)    (rms_norm.h)
//   q, k    = rotated (rope.h);  append k, v (append.h)
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"

#include "kernels/base/executor.h"
#include "kernels/base/tensor.h"
#include "kernels/dense/rope.h"
#include "kernels/paged/paged_kv.h"

namespace kvasir::kernels {

// Of one layer. float32 or bfloat16, the same in all.
struct LayerHeads {
  int64_t layer = 0;
  TensorView qkv;  // [tokens, (heads + 2 KV heads) * head_dim]: heads of q, of k, of v
  // [head_dim]; both empty: heads are not normalized.
  TensorView q_norm = {}, k_norm = {};
  float epsilon = 0;
  TensorView q;     // [tokens, heads, head_dim], written; heads may be 0
  TensorView k, v;  // [tokens, KV heads, head_dim]: working memory
};

struct AppendHeadsParams {
  const LayerHeads& heads;
  const PagedKv& kv;
  std::span<const QueryBlock> blocks;  // as of AppendParams
};

// INVALID_ARGUMENT on shapes and dtypes.
absl::Status CheckLayerHeads(const AppendHeadsParams& params);

// `rope`: of the step's tokens; null: keys are cached un-rotated. Errors of AppendKv, too.
absl::Status AppendHeads(const AppendHeadsParams& params, const RopeTable* rope,
                         Executor& executor);

}  // namespace kvasir::kernels
