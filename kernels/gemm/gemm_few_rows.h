// The kernel of CudaLinear for one row of x; it takes a few, as a reference for other kernels
// (gemm_algorithms.h). Only gemm_cuda.cc and gemm_algorithms.cc include it, which have checked. All
// pointers are device memory.
//
// Weights are read once, from begin to end. Speed needs enough of them on their way at any time:
// about 100 to 192 KiB a multiprocessor, which has one CTA. A warp takes tiles of 8
// rows of the weights in turn, copies its own rows ahead into shared memory, and multiplies by them
// on tensor cores, with the rows of x as the other operand. The first copies begin before the
// kernel waits for the kernel that makes x.
//
// A sum has one order, whatever M is and wherever its row lies in x: 16 columns at a time in
// ascending order, in one accumulator. Kernels for many rows have the same order
// (gemm_algorithms.h).
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "kernels/base/dtype.h"
#include "kernels/gemm/gemm.h"

namespace kvasir::kernels {

inline constexpr int64_t kFewRows = 8;

struct FewRowsLaunch {
  const BFloat16* x = nullptr;     // [num_rows][k]
  int64_t num_rows = 0;            // 1 to kFewRows
  int64_t k = 0;                   // a multiple of 8
  const BFloat16* norm = nullptr;  // [k]: x is normalized by it (rms_norm.h); null: not
  float epsilon = 0;
  const BFloat16* weights = nullptr;  // [n][k], of kSiluMul [2 n][k]
  const void* bias = nullptr;         // [n] or [2 n] of y's dtype; null for none
  LinearParams::After after = LinearParams::After::kStore;
  void* y = nullptr;  // [num_rows][n]
  int64_t n = 0;
  DType dtype = DType::kBFloat16;  // of y; float32 with kStore only
};

// Whether there is room for `num_rows` rows of x beside the copies. x, norm and weights must be
// aligned to 16 bytes, too.
bool FewRowsFit(int64_t num_rows, int64_t k);
// Whether x may have a norm.
bool FewRowsNormalize(int64_t k);

cudaError_t LaunchFewRows(const FewRowsLaunch& params, int num_processors, cudaStream_t stream);

}  // namespace kvasir::kernels
