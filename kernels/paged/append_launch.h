// The kernel behind append_cuda.h. Only append_cuda.cc includes it, after it has checked the
// shapes.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "kernels/paged/paged_kv.h"

namespace kvasir::kernels {

// All pointers are device memory.
struct AppendLaunch {
  const void* k = nullptr;  // [tokens, KV heads, head_dim]
  const void* v = nullptr;
  DType dtype = DType::kFloat32;  // of k and v: float32 or bfloat16
  PagedKv kv;
  int64_t layer = 0;
  const QueryBlock* blocks = nullptr;
  int64_t num_blocks = 0;  // at least one
  uint8_t* faults = nullptr;
};

cudaError_t LaunchAppend(const AppendLaunch& params, cudaStream_t stream);

}  // namespace kvasir::kernels
