// How tokens of prompts are scored: the options under which sampling (kernels/sampling/sampling.h)
// finds the log probability of a token that is given, and the answer made of what it finds. Called
// by the engine. Functions without state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/sampling/sampling.h"
#include "proto/kvasir/v1/worker.pb.h"
#include "worker/batch/sequence.h"

namespace kvasir::worker {

// Returns the number of most probable tokens that are found for each scored token.
size_t TopCount(const Sequence& sequence, int64_t vocab_size);

// Writes the options for the scored positions of all works, in order. They refer to `tops`, which
// is given room for all most probable tokens, side by side.
void AskForScores(std::span<const RowWork> works, int64_t vocab_size,
                  std::vector<kernels::TokenLogprob>& tops,
                  std::vector<kernels::SamplingOptions>& options);

// Returns the answer for the scored positions of one work. Token ids are left out. REQUIRES: `tops`
// has the same number of entries for each of the scores.
v1::PromptLogprobs PromptLogprobs(const RowWork& work,
                                  std::span<const kernels::SampledToken> scores,
                                  std::span<const kernels::TokenLogprob> tops);

}  // namespace kvasir::worker
