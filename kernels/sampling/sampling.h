// Chooses the next token of each row from its logits.
//
// The order and meaning of the filters are Hugging Face's and vLLM's:
//   1. biases are added;
//   2. penalties, for a token that occurs c times in the output:
//        in prompt or output:  logit = logit > 0 ? logit / repetition : logit * repetition
//        logit -= c * frequency + (c > 0) * presence
//   3. banned ids are removed;
//   4. at temperature 0 the largest logit wins, the smaller id among equals; otherwise
//   5. logits are divided by the temperature;
//   6. min-p drops tokens less than min_p times as probable as the most probable one;
//   7. top-k keeps the k largest, and all that equal the k-th (steps 6 and 7 commute);
//   8. top-p keeps the shortest prefix, in order of (larger logit, smaller id), whose share of the
//      probability left by steps 6 and 7 is at least p; at least one token;
//   9. one of the remaining tokens is drawn by inverse distribution in order of id, at a uniform
//      number that is a function of (seed, position) alone (philox.h).
// Logits stay finite in steps 1 and 2: they are clamped to the largest float. A row's result
// depends only on its logits and options, so all ranks agree without communication. It is the same
// on every device (sampling_cuda.h), in all bits: probabilities are integers, in units of 2^-40 of
// the largest (sampling_weights.h), so their sums do not depend on the order. Logprobs are the
// model's: log softmax of the given logits, before all filters.
//
// Cost: one pass over the vocabulary for each filter in use, and one over `prompt` and `output` for
// penalties. Occurrences are counted again for every token, so no counts have to be kept correct
// when a sequence is truncated, preempted or computed elsewhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/status.h"

#include "kernels/base/executor.h"
#include "kernels/base/tensor.h"

namespace kvasir::kernels {

struct TokenBias {
  int32_t token = 0;  // in [0, vocab)
  float bias = 0;     // finite
};

struct TokenLogprob {
  int32_t token = -1;
  float logprob = 0;
};

struct SamplingOptions {
  float temperature = 0;                 // >= 0; 0 is greedy
  int64_t top_k = 0;                     // >= 0; 0 is off
  float top_p = 1;                       // (0, 1]
  uint64_t seed = 0;                     //
  int64_t position = 0;                  // position of the sampled token in its sequence
  std::span<const int32_t> banned = {};  // ids in [0, vocab), e.g. EOS before min_tokens; any order
  float min_p = 0;                       // [0, 1]; 0 is off
  std::span<const TokenBias> biases = {};  // at most one for each token
  // Penalties, and the tokens that they count. Penalties are finite; repetition > 0, and 1 is off.
  float repetition_penalty = 1;
  float frequency_penalty = 0;
  float presence_penalty = 0;
  std::span<const int32_t> prompt = {};
  std::span<const int32_t> output = {};
  // A token of [0, vocab) that is taken whatever its logit: its logprob is what is asked for, and
  // biases, penalties, bans, filters and the draw are left out. -1: none.
  int32_t given = -1;
  bool wants_logprob = true;  // false: none is computed
  // Written: the most probable tokens in order of (larger logit, smaller id), up to the size of the
  // span. Entries beyond the vocabulary stay unchanged. A span that is not empty implies logprobs.
  std::span<TokenLogprob> top = {};
};

struct SampledToken {
  // DATA_LOSS: a logit is NaN or infinite (bad weights or KV). INVALID_ARGUMENT: options out of
  // range, or every token banned. Then `token` is -1; other rows are not affected.
  absl::Status status;
  int32_t token = -1;
  float logprob = 0;  // 0 when it is not wanted
};

struct SamplingParams {
  TensorView logits;  // [rows, vocab] float32; rows may be 0, vocab up to kMaxVocab
  std::span<const SamplingOptions> options;  // [rows]
  std::span<SampledToken> tokens;            // [rows], written
  // At least SamplingScratchBytes(), aligned to 64 bytes.
  std::span<std::byte> scratch;
};

int64_t SamplingScratchBytes(int64_t vocab, int num_threads);

// INVALID_ARGUMENT: shapes, dtypes, scratch. UNIMPLEMENTED: CUDA memory (see sampling_cuda.h).
absl::Status Sample(const SamplingParams& params, Executor& executor);

}  // namespace kvasir::kernels
