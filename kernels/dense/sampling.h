// Chooses the next token of each row from its logits.
//
// The order and meaning of the filters are Hugging Face's and vLLM's:
//   1. biases are added;
//   2. penalties, of a token that occurs c times in the output:
//        in prompt or output:  logit = logit > 0 ? logit / repetition : logit * repetition
//        logit -= c * frequency + (c > 0) * presence
//   3. banned ids are out;
//   4. temperature 0: the largest logit wins, the smaller id among equals; otherwise
//   5. logits are divided by the temperature;
//   6. min-p drops tokens less than min_p times as probable as the most probable one;
//   7. top-k keeps the k largest, and all that equal the k-th (6 and 7 commute);
//   8. top-p keeps the shortest prefix, in order of (larger logit, smaller id), whose share of the
//      probability left by 6 and 7 is at least p; at least one token;
//   9. one token is drawn from what is left by inverse distribution in order of id, at a uniform
//      number that is a function of (seed, position) alone (philox.h).
// What 1 and 2 make of a logit stays finite: it is cut off at the largest float.
// A row's result depends on its logits and options only, so all ranks agree without talking. It is
// the same on every device (sampling_cuda.h), in all bits: probabilities are integers, in units of
// 2^-40 of the largest (sampling_weights.h), and their sums have no order.
// Logprobs are the model's: log softmax of the logits as given, before all filters.
//
// Cost: one pass over the vocabulary for each filter in use, and one over `prompt` and `output`
// for penalties: occurrences are counted anew for every token, so nothing has to be kept right
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
  int64_t position = 0;                  // of the token to be chosen, in its sequence
  std::span<const int32_t> banned = {};  // ids in [0, vocab), e.g. EOS before min_tokens; any order
  float min_p = 0;                       // [0, 1]; 0 is off
  std::span<const TokenBias> biases = {};  // of one token at most one
  // Penalties, with the tokens that they count. Finite; repetition > 0, and 1 is off.
  float repetition_penalty = 1;
  float frequency_penalty = 0;
  float presence_penalty = 0;
  std::span<const int32_t> prompt = {};
  std::span<const int32_t> output = {};
  bool wants_logprob = true;  // else none is computed
  // Written: the most probable tokens in order of (larger logit, smaller id), as many as there is
  // room for. What is beyond the vocabulary stays as it is. Empty: not wanted; else logprobs are.
  std::span<TokenLogprob> top = {};
};

struct SampledToken {
  // DATA_LOSS: a logit is NaN or infinite (bad weights or KV). INVALID_ARGUMENT: options out of
  // range, or every token banned. The other rows are not affected, and `token` is -1.
  absl::Status status;
  int32_t token = -1;
  float logprob = 0;  // 0 where it is not wanted
};

struct SamplingParams {
  TensorView logits;  // [rows, vocab] float32; rows may be 0, vocab up to kMaxVocab
  std::span<const SamplingOptions> options;  // [rows]
  std::span<SampledToken> tokens;            // [rows], written
  // At least SamplingScratchBytes(), aligned to 64 bytes.
  std::span<std::byte> scratch;
};

int64_t SamplingScratchBytes(int64_t vocab, int num_threads);

// INVALID_ARGUMENT: shapes, dtypes, scratch. UNIMPLEMENTED: CUDA memory, which sampling_cuda.h
// takes.
absl::Status Sample(const SamplingParams& params, Executor& executor);

}  // namespace kvasir::kernels
