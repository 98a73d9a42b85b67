// The gate of a SwiGLU MLP: y = silu(gate) * up, silu(g) = g / (1 + exp(-g)).
//
// Inner arithmetic is float32. silu(gate) is rounded to the dtype before the product, as in Hugging
// Face's Llama MLP. Every element depends bitwise on its two inputs alone. By the formula large
// negative gates give -0, +inf gives +inf, and -inf gives NaN.
// Source: arXiv 2002.05202.
#pragma once

#include "absl/status/status.h"

#include "kernels/base/executor.h"
#include "kernels/base/tensor.h"

namespace kvasir::kernels {

struct SiluMulParams {
  TensorView gate_up;  // [tokens, 2 * dim] float32 or bfloat16: [gate | up]; tokens may be 0
  TensorView y;        // [tokens, dim] as gate_up; must not overlap it
};

// INVALID_ARGUMENT: shapes, dtypes. UNIMPLEMENTED: CUDA memory.
absl::Status SiluMul(const SiluMulParams& params, Executor& executor);

}  // namespace kvasir::kernels
