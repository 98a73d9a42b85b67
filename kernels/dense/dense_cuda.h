// The ops of this folder on the GPU. They take the same params as on the CPU, with all tensors and
// spans in device memory, and a stream instead of an executor. Formulas, dtypes and roundings are
// those of the ops' own headers; differences are noted here. Linear layers: gemm_cuda.h. Sampling:
// sampling_cuda.h. Called by the model when it runs on a GPU. Thread-safe. Only in builds with
// CUDA.
//
// They allocate nothing and wait for nothing, and may be captured in a graph. A row's result
// depends bitwise on the row alone. Rows may be unaligned: accesses are of 16 bytes where all
// pointers and the row's size allow it. All return INVALID_ARGUMENT on shapes, dtypes and tensors
// in host memory, and INTERNAL with CUDA's error when the launch fails.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/base/tensor.h"
#include "kernels/dense/embedding.h"
#include "kernels/dense/random_fill.h"
#include "kernels/dense/rms_norm.h"
#include "kernels/dense/silu_mul.h"

namespace kvasir::kernels {

// Returns whether the program was built for the current device: with its code, or with code that
// the driver can translate. Errors that this process had on the device before are errors here.
absl::StatusOr<bool> HasKernelsForDevice();

// Sums squares in another order than the CPU.
absl::Status RmsNorm(const RmsNormParams& params, cudaStream_t stream);

// y = round(y + x), with the bits of add.h; then normed = rms_norm(y), with the bits of RmsNorm
// above.
struct AddNormParams {
  TensorView x;            // [rows, dim] float32 or bfloat16; rows may be 0
  TensorView y;            // [rows, dim] as x
  TensorView weight = {};  // [dim] as x; empty: y is not normalized
  float epsilon = 0;       // >= 0
  TensorView normed = {};  // [rows, dim] as x, where there is a weight. No two may overlap
};
// One launch.
absl::Status AddNorm(const AddNormParams& params, cudaStream_t stream);

absl::Status SiluMul(const SiluMulParams& params, cudaStream_t stream);

// Ids are not checked before the launch. The row of an id outside the table becomes NaN (all bits
// set), which fails the sequence when its rows are checked.
absl::Status Embedding(const EmbeddingParams& params, cudaStream_t stream);

// Gives the CPU's bits.
absl::Status FillRandom(const RandomFillParams& params, cudaStream_t stream);

// The contents of RopeTable on the GPU: float32 cosines and sines of a step's positions.
struct RopeAngles {
  TensorView cos;  // [tokens, half_dim] float32; tokens may be 0
  TensorView sin;  // as cos
};

struct RopeAnglesParams {
  std::span<const int64_t> positions;  // [tokens], any value
  std::span<const double> inv_freq;    // [half_dim]
  double attention_scaling = 1;
  RopeAngles angles;  // written
};

// As RopeTable::SetPositions, in float64. The last bit may differ where the GPU's cosine does.
absl::Status ComputeRopeAngles(const RopeAnglesParams& params, cudaStream_t stream);

struct FiniteTokensParams {
  TensorView x;  // [tokens, dim] float32 or bfloat16; tokens may be 0
  // [tokens], written: 1 when the row has no NaN and no infinity, else 0.
  std::span<uint8_t> finite;
};

absl::Status FindFiniteTokens(const FiniteTokensParams& params, cudaStream_t stream);

}  // namespace kvasir::kernels
