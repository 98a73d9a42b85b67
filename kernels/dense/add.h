// The residual addition on the CPU: y[r, i] = round(y[r, i] + round(x[r, i])), where round() is to
// y's dtype and sums are float32. Every element depends only on its two inputs. On the GPU:
// dense_cuda.h, and ops that add what they compute (gemm_cuda.h, ranks/rank_ops_cuda.h).
#pragma once

#include "absl/status/status.h"

#include "kernels/base/executor.h"
#include "kernels/base/tensor.h"

namespace kvasir::kernels {

// x [rows, width] float32 or bfloat16, y [rows, width] float32 or bfloat16. rows may be 0. x and y
// must not overlap. INVALID_ARGUMENT: shapes, dtypes. UNIMPLEMENTED: CUDA memory.
absl::Status AddTo(const TensorView& x, const TensorView& y, Executor& executor);

}  // namespace kvasir::kernels
