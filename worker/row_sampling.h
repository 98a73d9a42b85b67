// How the tokens of a row are sampled: from what a request asked (worker.proto) to the options of
// the op (kernels/dense/sampling.h), and from the op's result to the reply. Everything derives from
// the sequence's own tokens and from the position, nothing is kept from step to step. Called by the
// engine. Thread-compatible.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/dense/sampling.h"
#include "proto/kvasir/v1/worker.pb.h"
#include "worker/sequence.h"

namespace kvasir::worker {

// What the options of one row refer to.
struct RowSamplingBuffers {
  std::vector<int32_t> banned;
  std::vector<kernels::TokenBias> biases;
  std::vector<kernels::TokenLogprob> top;
};

// Whether the options depend on which tokens the sequence has, and not on how many only.
bool CountsTokens(const v1::RowSampling& sampling);

// Of the token at `position`, which follows all earlier ones. The options refer to `buffers`, and
// to `sequence` if they count tokens.
kernels::SamplingOptions MakeSamplingOptions(const Sequence& sequence, int64_t position,
                                             int64_t vocab_size, RowSamplingBuffers& buffers);

// REQUIRES: the token was sampled with `buffers`.
v1::TokenLogprobs Logprobs(const kernels::SampledToken& token, const RowSamplingBuffers& buffers);

}  // namespace kvasir::worker
