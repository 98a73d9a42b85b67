// Internal to sampling: a row's request and result, as plain records that a device reads and
// writes.
#pragma once

#include <cstdint>

#include "kernels/sampling/sampling_weights.h"

namespace kvasir::kernels {

// The amount is a biased token's bias or a penalized token's occurrences in the output. A banned
// token has none.
struct TokenChange {
  int32_t token = 0;
  float amount = 0;
};

struct TokenLogit {
  int32_t token = -1;
  float logit = 0;
};

// A row to sample.
struct SamplingRecord {
  double uniform = 0;  // in [0, 1)
  uint64_t min_weight = 0;
  int64_t top_k = 0;
  float temperature = 0;
  float top_p = 1;
  Penalties penalties = {};
  // Biases, then penalized tokens (each token at most once in either), then banned ones.
  const TokenChange* changes = nullptr;
  TokenLogit* top = nullptr;  // written, in any order
  int32_t num_biases = 0, num_penalized = 0, num_banned = 0;
  int32_t num_top = 0;  // at most the vocabulary
  int32_t given = -1;   // not -1: the row's token; then it has no changes and temperature 0
  int32_t wants_logprob = 0;
  int32_t is_valid = 0;  // 0: the row is skipped

  KVASIR_HOST_DEVICE bool changes_logits() const {
    return num_biases + num_penalized + num_banned > 0;
  }
};

// A row's result, from the logits as given.
struct FoundToken {
  uint64_t total = 0;      // sum of all weights at temperature 1, if logprobs are wanted
  float max = 0;           // the largest logit
  float logit = 0;         // of `token`
  int32_t token = -1;      // -1: every token is banned
  int32_t bad_token = -1;  // the first token with a logit that is not finite, or -1
  float bad_logit = 0;
};

}  // namespace kvasir::kernels
