// Prepares a layer's projected queries, keys and values for attention: normalizes heads where the
// model does so, rotates them to the step's positions where keys are cached rotated, and appends
// keys and values to the layer's pages with their digests. Called by the backends. On the CPU it is
// composed of other ops, and is the reference of append_heads_cuda.h. Thread-compatible.
//
//   q, k, v = columns of qkv;  q, k = rms_norm(q, q_norm), rms_norm(k, k_norm)    (rms_norm.h)
//   q, k    = rotated (rope.h);  append k, v (append.h)
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"

#include "kernels/base/executor.h"
#include "kernels/base/tensor.h"
#include "kernels/paged/paged_kv.h"
#include "kernels/rope/rope.h"

namespace kvasir::kernels {

// Heads of one layer. All tensors have the same dtype, float32 or bfloat16.
struct LayerHeads {
  int64_t layer = 0;
  TensorView qkv;  // [tokens, (heads + 2 KV heads) * head_dim]: heads of q, of k, of v
  // [head_dim]. Both are empty when heads are not normalized.
  TensorView q_norm = {}, k_norm = {};
  float epsilon = 0;
  TensorView q;     // [tokens, heads, head_dim], written; heads may be 0
  TensorView k, v;  // [tokens, KV heads, head_dim]: working memory
};

struct AppendHeadsParams {
  const LayerHeads& heads;
  const PagedKv& kv;
  std::span<const QueryTile> tiles;  // as in AppendParams
};

// INVALID_ARGUMENT on shapes and dtypes.
absl::Status CheckLayerHeads(const AppendHeadsParams& params);

// `rope` holds the angles of the step's tokens, or is null when keys are cached un-rotated. Also
// returns the errors of AppendKv.
absl::Status AppendHeads(const AppendHeadsParams& params, const RopeTable* rope,
                         Executor& executor);

}  // namespace kvasir::kernels
