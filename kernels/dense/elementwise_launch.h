// Kernels of dense_cuda.h: parameters in the device's form, and the launches. Only dense_cuda.cc
// includes this header, after it has checked the shapes. All pointers are device memory.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "kernels/dense/elementwise.h"
#include "kernels/dense/random_rows.h"

namespace kvasir::kernels {

// Rows that are added to, normalized, or both, in that order.
struct SumNormLaunch {
  const void* added;   // [rows][dim]; null: nothing is added
  void* sum;           // [rows][dim]: what is added to, and the sum; unchanged if nothing is added
  const void* weight;  // [dim]; null: the sum is not normalized
  void* normed;        // [rows][dim]; may be `sum` where nothing is added
  DType dtype;         // of all: float32 or bfloat16
  int64_t dim;
  float epsilon;
};

struct AnglesLaunch {
  const int64_t* positions;  // [tokens]
  const double* inv_freq;    // [half_dim]
  double attention_scaling;
  int64_t half_dim;
  float* cos;  // [tokens][half_dim]
  float* sin;  // [tokens][half_dim]
};

struct GatherLaunch {
  const void* table;  // [num_rows][row_bytes]
  int64_t num_rows;
  const int32_t* ids;  // [tokens]
  void* y;             // [tokens][row_bytes]
  int64_t row_bytes;   // even
};

struct FiniteLaunch {
  const void* x;  // [tokens][dim]
  DType dtype;    // float32 or bfloat16
  int64_t dim;
  uint8_t* finite;  // [tokens]
};

// An error when the program has no kernels for the current device.
cudaError_t FindKernels();

// `count` is the number of rows or tokens, at least one; each has at least one element.
cudaError_t LaunchSumNorm(const SumNormLaunch& params, int64_t count, cudaStream_t stream);
cudaError_t LaunchSiluMul(const SiluMulRows& rows, int64_t count, cudaStream_t stream);
cudaError_t LaunchRopeAngles(const AnglesLaunch& params, int64_t count, cudaStream_t stream);
cudaError_t LaunchGather(const GatherLaunch& params, int64_t count, cudaStream_t stream);
cudaError_t LaunchFinite(const FiniteLaunch& params, int64_t count, cudaStream_t stream);
// `count` is the number of elements.
cudaError_t LaunchRandomFill(const RandomRows& rows, int64_t count, cudaStream_t stream);

}  // namespace kvasir::kernels
