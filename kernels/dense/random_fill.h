// A tensor of uniform random numbers that depend only on a seed and an element's place:
//
//   y[r, c] = mean + spread * (2 u - 1)
//   u       = UniformOf(seed, (first_row + r) * width + first_col + c)
//
// (random_rows.h), computed in float64. So a slice of a tensor has the numbers of the whole tensor,
// bit by bit, on any rank or device. For weights of models that are only shapes, and for KV of
// benchmarks.
#pragma once

#include <cstdint>

#include "absl/status/status.h"

#include "kernels/base/executor.h"
#include "kernels/base/tensor.h"

namespace kvasir::kernels {

struct RandomFillParams {
  TensorView y;  // [rows, cols] float32 or bfloat16, or [rows] as one column; may be empty
  uint64_t seed = 0;
  double mean = 0;
  double spread = 0;  // half of the range; the standard deviation is spread / sqrt(3)
  // Place of y in the whole tensor, which has `width` columns, at least first_col + cols.
  int64_t first_row = 0;
  int64_t first_col = 0;
  int64_t width = 0;
};

// INVALID_ARGUMENT: shapes, dtypes. UNIMPLEMENTED: CUDA memory.
absl::Status FillRandom(const RandomFillParams& params, Executor& executor);

}  // namespace kvasir::kernels
