// Kernel of append_heads_cuda.h. Only append_heads_cuda.cc includes this header, after it has
// checked the shapes.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "kernels/append/append_heads_plan.h"
#include "kernels/paged/paged_kv.h"

namespace kvasir::kernels {

// All pointers are device memory.
struct AppendHeadsLaunch {
  const void* qkv = nullptr;      // [tokens, heads + 2 KV heads, head_dim]
  DType dtype = DType::kFloat32;  // of everything except the KV: float32 or bfloat16
  int64_t num_tokens = 0;
  int64_t num_heads = 0;         // of q
  const void* q_norm = nullptr;  // [head_dim]; null: heads are not normalized
  const void* k_norm = nullptr;
  float epsilon = 0;
  const float* cos = nullptr;  // [tokens][head_dim / 2]; null: heads are not rotated
  const float* sin = nullptr;
  void* q = nullptr;  // [tokens, heads, head_dim]
  PagedKv kv;
  int64_t layer = 0;
  const QueryTile* tiles = nullptr;
  int64_t num_tiles = 0;
  uint8_t* faults = nullptr;
};

cudaError_t LaunchAppendHeads(const AppendHeadsLaunch& params, const AppendHeadsPlan& plan,
                              cudaStream_t stream);

}  // namespace kvasir::kernels
