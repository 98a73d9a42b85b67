#include "worker/batch/row_sampling.h"

#include <algorithm>
#include <span>

namespace kvasir::worker {

bool CountsTokens(const v1::RowSampling& sampling) {
  return sampling.repetition_penalty() != 1 || sampling.frequency_penalty() != 0 ||
         sampling.presence_penalty() != 0;
}

kernels::SamplingOptions MakeSamplingOptions(const Sequence& sequence, int64_t position,
                                             int64_t vocab_size, RowSamplingBuffers& buffers) {
  const v1::RowSampling& sampling = sequence.sampling;
  if (position - sequence.prompt_size < int64_t{sampling.min_tokens()}) {
    const auto& stops = sampling.stop_token_ids();
    buffers.banned.assign(stops.begin(), stops.end());
  }
  for (const v1::LogitBias& bias : sampling.logit_bias()) {
    buffers.biases.push_back({.token = static_cast<int32_t>(bias.token_id()), .bias = bias.bias()});
  }
  buffers.top.resize(static_cast<size_t>(std::min<int64_t>(sampling.logprobs(), vocab_size)));
  std::span<const int32_t> prompt, output;
  if (CountsTokens(sampling)) {
    const auto known =
        std::span<const int32_t>(sequence.tokens).first(static_cast<size_t>(position));
    prompt = known.first(static_cast<size_t>(sequence.prompt_size));
    output = known.subspan(prompt.size());
  }
  return {.temperature = sampling.temperature(),
          .top_k = sampling.top_k(),
          .top_p = sampling.top_p(),
          .seed = sampling.seed(),
          .position = position,
          .banned = buffers.banned,
          .min_p = sampling.min_p(),
          .biases = buffers.biases,
          .repetition_penalty = sampling.repetition_penalty(),
          .frequency_penalty = sampling.frequency_penalty(),
          .presence_penalty = sampling.presence_penalty(),
          .prompt = prompt,
          .output = output,
          .wants_logprob = sampling.has_logprobs(),
          .top = buffers.top};
}

v1::TokenLogprobs Logprobs(const kernels::SampledToken& token, const RowSamplingBuffers& buffers) {
  v1::TokenLogprobs logprobs;
  logprobs.set_logprob(token.logprob);
  for (const kernels::TokenLogprob& entry : buffers.top) {
    v1::TopLogprob& top = *logprobs.add_top();
    top.set_token_id(static_cast<uint32_t>(entry.token));
    top.set_logprob(entry.logprob);
  }
  return logprobs;
}

}  // namespace kvasir::worker
