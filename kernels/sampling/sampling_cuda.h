// The op of sampling.h on the GPU, with the same results bit for bit, errors included. The rows'
// requests and results lie in one block of pinned memory that the GPU reads and writes in place, so
// nothing is copied. A step fills the block, launches, waits, and reads. Called by the backend.
// Thread-safe. Only in builds with CUDA.
//
// Cost: a cluster of up to sixteen CTAs a row, fewer when there are many rows. Greedy rows read
// their logits once. Each of the following reads them again, mostly from the CTA's own cache, once
// or the given number of times: a copy when options change logits, logprobs, top logprobs (3),
// top-k (2), top-p (2), the draw.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cuda_runtime_api.h>
#include <span>

#include "absl/status/status.h"

#include "kernels/sampling/sampling.h"

namespace kvasir::kernels {

// Returns the bytes of the block for these rows. Fewer or simpler rows need no more.
int64_t SamplingBlockBytes(std::span<const SamplingOptions> options, int64_t vocab);
// Returns whether any row changes logits, and so needs memory for the changed ones.
bool ChangesLogits(std::span<const SamplingOptions> options);

// `block` has SamplingBlockBytes bytes, aligned to 64. Rows with options out of range are skipped
// by the ops below.
void FillSamplingBlock(std::span<const SamplingOptions> options, int64_t vocab, std::byte* block);

struct DeviceSamplingParams {
  TensorView logits;         // [rows, vocab] float32; rows may be 0, vocab up to kMaxVocab
  std::byte* block;          // pinned, filled before the stream reaches the op
  int64_t block_rows = 0;    // number of rows of the block
  int64_t first_row = 0;     // the block's row of the first row of logits
  float* changed = nullptr;  // working memory [rows, vocab]; null if ChangesLogits is false
};

// INVALID_ARGUMENT: shapes, dtypes, host memory. INTERNAL with CUDA's error when the launch fails.
// May be captured in a graph: the launch depends only on the params, not on the block's contents.
absl::Status Sample(const DeviceSamplingParams& params, cudaStream_t stream);

struct FeedParams {
  std::byte* block = nullptr;  // of an earlier Sample on the stream, with `rows` rows
  int64_t rows = 0;
  std::span<const int32_t> fed_by;  // [tokens] a row of the block, or -1: the token stays unchanged
  std::span<int32_t> tokens;        // [tokens] written where fed_by is a row
};

// Feeds the tokens that the previous step samples into the next step, without the host. Spans are
// device memory. A failed row feeds -1, which is in no embedding table. INTERNAL when the launch
// fails.
absl::Status FeedTokens(const FeedParams& params, cudaStream_t stream);

// Called when the device is done with the block. `options` are those that it was filled from.
// Writes their `top`, and `tokens` [rows].
void ReadSamplingBlock(std::span<const SamplingOptions> options, int64_t vocab, std::byte* block,
                       std::span<SampledToken> tokens);

}  // namespace kvasir::kernels
