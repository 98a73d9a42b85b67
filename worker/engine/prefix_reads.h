// How much of a reused prefix the rest of a prompt reads: the question whether its pages should
// come to fast memory first. Stateless.
#pragma once

#include <cstdint>
#include <span>

#include "proto/kvasir/v1/sparsity.pb.h"
#include "worker/batch/sequence.h"

namespace kvasir::worker {

// The attention of one phase: as the server declared it, and with the sequence's numbers.
struct PhaseReads {
  const v1::AttentionPolicy& declared;
  const PhasePolicy& phase;
};

// Whether the query tiles that are left of the sequence's known tokens, and the tokens of its
// tail, read at least as many tokens of the prefix [0, kv_length) as it has, in the mean over
// layers. An estimate: a selector reads what it may choose at most, and never beyond its budget.
// `layer_windows`: ModelConfig::layer_windows.
bool ReadWholePrefix(const Sequence& sequence, const PhaseReads& prefill, const PhaseReads& decode,
                     int64_t num_layers, std::span<const int64_t> layer_windows);

}  // namespace kvasir::worker
