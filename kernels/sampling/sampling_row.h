// Internal to sampling: one row's options and its result, whichever device computed it.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/sampling/sampling.h"
#include "kernels/sampling/sampling_records.h"

namespace kvasir::kernels {

// INVALID_ARGUMENT for options out of range.
absl::Status CheckOptions(const SamplingOptions& options, int64_t vocab);

inline bool HasPenalties(const SamplingOptions& options) {
  return options.repetition_penalty != 1 || options.frequency_penalty != 0 ||
         options.presence_penalty != 0;
}
inline Penalties PenaltiesOf(const SamplingOptions& options) {
  return {.repetition = options.repetition_penalty,
          .frequency = options.frequency_penalty,
          .presence = options.presence_penalty};
}
inline bool WantsLogprobs(const SamplingOptions& options) {
  return options.wants_logprob || !options.top.empty();
}

// Writes to `occurrences` [vocab] how often each token is in the output, and -1 for a token that is
// not in the prompt either. REQUIRES: checked options.
void CountOccurrences(const SamplingOptions& options, std::span<int32_t> occurrences);

// Makes a row's result from what was found. `top`, in any order, has the tokens for the options'
// top.
SampledToken FinishRow(const FoundToken& found, const SamplingOptions& options,
                       std::span<TokenLogit> top);

// All are [vocab]. Their contents are ignored and overwritten.
struct SamplingScratch {
  std::span<float> logits;
  std::span<float> values;
  std::span<uint64_t> weights;
  std::span<int32_t> candidates;
};

SampledToken SampleRow(std::span<const float> logits, const SamplingOptions& options,
                       const SamplingScratch& scratch);

}  // namespace kvasir::kernels
