#include "worker/batch/prompt_scoring.h"

#include <algorithm>

namespace kvasir::worker {

size_t TopCount(const Sequence& sequence, int64_t vocab_size) {
  return static_cast<size_t>(std::min(int64_t{sequence.sampling.prompt_logprobs()}, vocab_size));
}

void AskForScores(std::span<const RowWork> works, int64_t vocab_size,
                  std::vector<kernels::TokenLogprob>& tops,
                  std::vector<kernels::SamplingOptions>& options) {
  size_t num_tops = 0;
  for (const RowWork& work : works) {
    num_tops += static_cast<size_t>(work.score_end - work.score_begin) *
                TopCount(*work.sequence, vocab_size);
  }
  tops.assign(num_tops, {});
  std::span<kernels::TokenLogprob> rest = tops;
  for (const RowWork& work : works) {
    for (int64_t position = work.score_begin; position < work.score_end; ++position) {
      const size_t count = TopCount(*work.sequence, vocab_size);
      options.push_back({.given = work.sequence->tokens[static_cast<size_t>(position + 1)],
                         .top = rest.first(count)});
      rest = rest.subspan(count);
    }
  }
}

v1::PromptLogprobs PromptLogprobs(const RowWork& work,
                                  std::span<const kernels::SampledToken> scores,
                                  std::span<const kernels::TokenLogprob> tops) {
  v1::PromptLogprobs result;
  result.set_index(static_cast<uint32_t>(work.score_begin + 1));
  result.mutable_logprobs()->Reserve(static_cast<int>(scores.size()));
  for (const kernels::SampledToken& score : scores) result.add_logprobs(score.logprob);
  result.set_top_count(static_cast<uint32_t>(tops.size() / scores.size()));
  result.mutable_top_token_ids()->Reserve(static_cast<int>(tops.size()));
  result.mutable_top_logprobs()->Reserve(static_cast<int>(tops.size()));
  for (const kernels::TokenLogprob& top : tops) {
    result.add_top_token_ids(static_cast<uint32_t>(top.token));
    result.add_top_logprobs(top.logprob);
  }
  return result;
}

}  // namespace kvasir::worker
