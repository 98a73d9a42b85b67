// The residual addition after a product of many rows: y = round(y + x), where x was rounded before,
// as the kernel for a few rows does within. Only gemm_cuda.cc includes it.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "kernels/base/dtype.h"

namespace kvasir::kernels {

struct AddRowsLaunch {
  const void* x = nullptr;  // [count] of `dtype`, device memory
  void* y = nullptr;        // likewise; overlaps nothing of x
  int64_t count = 0;
  DType dtype = DType::kBFloat16;  // or float32
};

cudaError_t LaunchAddRows(const AddRowsLaunch& params, cudaStream_t stream);

}  // namespace kvasir::kernels
