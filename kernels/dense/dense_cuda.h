// The ops of this folder on the GPU: the same params as on the CPU with all tensors in device
// memory (spans, too), and a stream in place of an executor. Formulas, dtypes and roundings are
// those of the ops' own headers, what differs is said here. Linear layers: gemm_cuda.h; sampling:
// sampling_cuda.h. Called by the model where it runs on a GPU. Thread-safe. Only in builds with
// CUDA.
//
// Nothing is allocated or waited for; every op may be captured in a graph. A row's result depends
// on nothing but the row, bitwise. Rows may be unaligned: accesses of 16 bytes are used where all
// pointers and the row's size allow them.
// Errors of all: INVALID_ARGUMENT on shapes, dtypes and tensors in host memory; INTERNAL with
// CUDA's error when the launch fails.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>
#include <span>

#include "absl/status/status.h"

#include "kernels/base/tensor.h"
#include "kernels/dense/embedding.h"
#include "kernels/dense/random_fill.h"
#include "kernels/dense/rms_norm.h"
#include "kernels/dense/silu_mul.h"

namespace kvasir::kernels {

// Squares are summed in another order than on the CPU.
absl::Status RmsNorm(const RmsNormParams& params, cudaStream_t stream);

absl::Status SiluMul(const SiluMulParams& params, cudaStream_t stream);

// Ids are not looked at before the launch: for one outside of the table the row becomes NaN (all
// bits set), which fails the sequence where its rows are checked.
absl::Status Embedding(const EmbeddingParams& params, cudaStream_t stream);

// With the bits of the CPU's.
absl::Status FillRandom(const RandomFillParams& params, cudaStream_t stream);

// What RopeTable holds on the CPU: float32 cosines and sines of a step's positions.
struct RopeAngles {
  TensorView cos;  // [tokens, half_dim] float32; tokens may be 0
  TensorView sin;  // likewise
};

struct RopeAnglesParams {
  std::span<const int64_t> positions;  // [tokens], any value
  std::span<const double> inv_freq;    // [half_dim]
  double attention_scaling = 1;
  RopeAngles angles;  // written
};

// As RopeTable::SetPositions, in float64; the last bit may differ where the GPU's cosine does.
absl::Status ComputeRopeAngles(const RopeAnglesParams& params, cudaStream_t stream);

struct FiniteTokensParams {
  TensorView x;  // [tokens, dim] float32 or bfloat16; tokens may be 0
  // [tokens], written: 1 where the row has no NaN and no infinity, else 0.
  std::span<uint8_t> finite;
};

absl::Status FindFiniteTokens(const FiniteTokensParams& params, cudaStream_t stream);

}  // namespace kvasir::kernels
