// Chooses the next token of each row from its logits.
//
// The order and meaning of the filters are Hugging Face's and vLLM's:
//   1. banned ids are out;
//   2. temperature 0: the largest logit wins, the smaller id among equals; otherwise
//   3. logits are divided by the temperature;
//   4. top-k keeps the k largest, and all that equal the k-th;
//   5. top-p keeps the shortest prefix, in order of (larger logit, smaller id), whose share of the
//      probability left by top-k is at least p; at least one token;
//   6. one token is drawn from what is left by inverse distribution in order of id, at a uniform
//      number that is a function of (seed, position) alone (philox.h).
// A row's result depends on its logits and options only, so all ranks agree without talking.
// `logprob` is that of the model: log softmax of the logits as given, before all filters.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/status.h"

#include "kernels/base/executor.h"
#include "kernels/base/tensor.h"

namespace kvasir::kernels {

struct SamplingOptions {
  float temperature = 0;                 // >= 0; 0 is greedy
  int64_t top_k = 0;                     // >= 0; 0 is off
  float top_p = 1;                       // (0, 1]
  uint64_t seed = 0;                     //
  int64_t position = 0;                  // of the token to be chosen, in its sequence
  std::span<const int32_t> banned = {};  // ids in [0, vocab), e.g. EOS before min_tokens; any order
};

struct SampledToken {
  // DATA_LOSS: a logit is NaN or infinite (bad weights or KV). INVALID_ARGUMENT: options out of
  // range, or every token banned. The other rows are not affected, and `token` is -1.
  absl::Status status;
  int32_t token = -1;
  float logprob = 0;
};

struct SamplingParams {
  TensorView logits;                         // [rows, vocab] float32; rows may be 0
  std::span<const SamplingOptions> options;  // [rows]
  std::span<SampledToken> tokens;            // [rows], written
  // At least SamplingScratchBytes(), aligned to 64 bytes.
  std::span<std::byte> scratch;
};

int64_t SamplingScratchBytes(int64_t vocab, int num_threads);

// INVALID_ARGUMENT: shapes, dtypes, scratch. UNIMPLEMENTED: CUDA memory.
absl::Status Sample(const SamplingParams& params, Executor& executor);

}  // namespace kvasir::kernels
