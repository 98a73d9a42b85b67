// How the tokens of a row are sampled: converts a request's parameters (worker.proto) to the
// options of the op (kernels/sampling/sampling.h), and the op's result to the reply. Everything is
// derived from the sequence's own tokens and from the position; nothing is kept between steps.
// Called by the engine. Thread-compatible.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/sampling/sampling.h"
#include "proto/kvasir/v1/worker.pb.h"
#include "worker/batch/sequence.h"

namespace kvasir::worker {

// Memory that the options of one row refer to.
struct RowSamplingBuffers {
  std::vector<int32_t> banned;
  std::vector<kernels::TokenBias> biases;
  std::vector<kernels::TokenLogprob> top;
};

// Whether the options depend on which tokens the sequence has, not only on their number.
bool CountsTokens(const v1::RowSampling& sampling);

// Returns the options for the token at `position`, which follows all earlier ones. They refer to
// `buffers`, and to `sequence` if they count tokens.
kernels::SamplingOptions MakeSamplingOptions(const Sequence& sequence, int64_t position,
                                             int64_t vocab_size, RowSamplingBuffers& buffers);

// REQUIRES: the token was sampled with `buffers`.
v1::TokenLogprobs Logprobs(const kernels::SampledToken& token, const RowSamplingBuffers& buffers);

}  // namespace kvasir::worker
