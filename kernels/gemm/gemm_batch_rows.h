// The kernel of CudaLinear for a batch of rows of x: 2 to 64.
// Only gemm_cuda.cc includes it, after it has checked. All pointers are device memory.
//
// Weights are read once, from begin to end, by the copy engine. A CTA takes tiles of some rows of
// the weights and walks all of K by itself, 64 columns a step. The two CTAs of a cluster need the
// same columns of x at the same time: each copies half of the rows to both. Copies of weights begin
// before the kernel waits for the kernel that makes x. A sum has the order of gemm_few_rows.h.
#pragma once

#include <cstdint>
#include <cuda.h>
#include <cuda_runtime_api.h>

#include "kernels/base/dtype.h"
#include "kernels/gemm/gemm.h"
#include "kernels/gemm/gemm_batch_plan.h"

namespace kvasir::kernels {

struct BatchRowsLaunch {
  CUtensorMap x;        // [num_rows][k], in boxes of plan.x_rows rows
  CUtensorMap weights;  // [n][k], of kSiluMul [2 n][k], in boxes of BatchBoxRows rows
  int num_rows = 0;     // 1 to kBatchRows
  int k = 0;
  const void* bias = nullptr;  // [n] or [2 n] of y's dtype; null for none
  LinearParams::After after = LinearParams::After::kStore;  // or kSiluMul
  void* y = nullptr;                                        // [num_rows][n]
  int n = 0;
  DType dtype = DType::kBFloat16;  // of y; float32 with kStore only
  BatchPlan plan;
};

// Rows of the weights that one copy brings: a tile, or one half of a gated one.
constexpr int BatchBoxRows(int tile_units, LinearParams::After after) {
  const int rows = tile_units * static_cast<int>(kBatchUnitRows);
  return after == LinearParams::After::kSiluMul ? rows / 2 : rows;
}

cudaError_t LaunchBatchRows(const BatchRowsLaunch& params, cudaStream_t stream);

}  // namespace kvasir::kernels
