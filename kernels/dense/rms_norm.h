// RMSNorm. The model calls it before attention, before the MLP, before the output head, and on the
// heads of q and k (Qwen3). A [tokens, heads, head_dim] tensor is [tokens * heads, head_dim] rows.
//
//   y[r, d] = round(weight[d] * round(x[r, d] / sqrt(mean_d(x[r, d]^2) + epsilon)))
//
// Inner arithmetic is float32. round() is to the dtype of the tensors, in the places where Hugging
// Face's LlamaRMSNorm rounds. A row depends bitwise on itself alone. A row with a NaN or an
// infinity (or whose squares overflow) follows the formula: it gives NaNs, or zeros beside them.
// Source: arXiv 1910.07467, equation 4.
#pragma once

#include "absl/status/status.h"

#include "kernels/base/executor.h"
#include "kernels/base/tensor.h"

namespace kvasir::kernels {

struct RmsNormParams {
  TensorView x;       // [rows, dim] float32 or bfloat16; rows may be 0
  TensorView weight;  // [dim] as x
  TensorView y;       // [rows, dim] as x; may be x itself
  float epsilon = 0;  // >= 0
};

// INVALID_ARGUMENT: shapes, dtypes, epsilon. UNIMPLEMENTED: CUDA memory.
absl::Status RmsNorm(const RmsNormParams& params, Executor& executor);

}  // namespace kvasir::kernels
