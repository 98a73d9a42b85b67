// The op of sampling.h on the GPU: the same results, bit for bit, errors included. What rows ask
// for and what is found lie in one block of pinned memory that the GPU reads and writes in place,
// so nothing is copied; a step fills the block, launches, waits, and reads. Called by the backend.
// Thread-safe. Only in builds with CUDA.
//
// Cost: a cluster of up to sixteen blocks of threads a row, fewer where rows are many. Greedy rows
// read their logits once. Each of these reads them once more, mostly from the block's own cache, or
// as many times as is said: a copy where options change logits, logprobs, top logprobs (3), top-k
// (2), top-p (2), the draw.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cuda_runtime_api.h>
#include <span>

#include "absl/status/status.h"

#include "kernels/dense/sampling.h"

namespace kvasir::kernels {

// Of the block for these rows; fewer bytes do for fewer or simpler rows.
int64_t SamplingBlockBytes(std::span<const SamplingOptions> options, int64_t vocab);
// Whether any row changes logits, and thus needs memory for the changed ones.
bool ChangesLogits(std::span<const SamplingOptions> options);

// `block` has SamplingBlockBytes bytes, aligned to 64. Rows with options out of range are left out
// of what follows.
void FillSamplingBlock(std::span<const SamplingOptions> options, int64_t vocab, std::byte* block);

struct DeviceSamplingParams {
  TensorView logits;         // [rows, vocab] float32; rows may be 0, vocab up to kMaxVocab
  std::byte* block;          // as filled when the stream comes to it, rows as of logits; pinned
  float* changed = nullptr;  // working memory [rows, vocab]; null: ChangesLogits is false
};

// INVALID_ARGUMENT: shapes, dtypes, host memory. INTERNAL with CUDA's error when the launch fails.
// May be captured in a graph: it depends on the params alone, not on what the block says.
absl::Status Sample(const DeviceSamplingParams& params, cudaStream_t stream);

struct FeedParams {
  std::byte* block = nullptr;  // of a Sample before on the stream, of `rows` rows
  int64_t rows = 0;
  std::span<const int32_t> fed_by;  // [tokens] a row of the block, or -1: that token stays
  std::span<int32_t> tokens;        // [tokens] written where they are fed
};

// Tokens of a step that the step before samples, without the host. Spans are device memory. A row
// that failed feeds -1, which no table of embeddings has. INTERNAL when the launch fails.
absl::Status FeedTokens(const FeedParams& params, cudaStream_t stream);

// Of the options that the block was filled from, when the device is done with it: writes their
// `top`, and `tokens` [rows].
void ReadSamplingBlock(std::span<const SamplingOptions> options, int64_t vocab, std::byte* block,
                       std::span<SampledToken> tokens);

}  // namespace kvasir::kernels
