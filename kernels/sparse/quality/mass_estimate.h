// Estimates how much of its attention mass a query keeps under a selection, before attention reads
// anything. For a query head of a row with attended tokens A, of all tokens up to the query:
//
//   l_j    = scale * q . k_j           exact, for j in A
//   l~_j   = scale * q . k~_j          from key codes (code_logits.h), for the others
//   mass   = sum over A of exp(l_j) / (sum over A of exp(l_j) + sum over the others of exp(l~_j))
//
// One of the other tokens is heavy if, for some head of the group, exp(l~_j) is more than 1 / 256
// of the weight known so far: that of A and of the others already added. Its logit is then computed
// exactly. The others are visited by pages, ascending; heavy ones are added when 64 are collected,
// or at the end. The remaining error is that of the codes of many light tokens, which averages out.
// It is calibrated in docs/quality.md.
//
// Where keys are cached un-rotated there is no dense attention whose mass could be kept. Then all
// tokens between sink and window, attended to or not, are placed at the distance at which selectors
// see them (SelectionDistance), and sink and window at their compact positions.
//
// An estimate depends on its row alone. Cost: reads the attended and the heavy keys, and head_dim /
// 2 + 4 bytes of every other token. Thread-safe.
#pragma once

#include <span>

#include "absl/status/status.h"

#include "kernels/sparse/common/stages.h"

namespace kvasir::kernels {

// `params` are those of the Select call that filled `selection`, which may have been pruned. Where
// keys are un-rotated, positions are assigned. mass [rows, heads of a KV head's group]: 1 for rows
// of kind kAll, NaN (unknown) for rows of several queries and slots with a fault. INVALID_ARGUMENT
// on shapes, FAILED_PRECONDITION without key codes.
absl::Status EstimateMass(const SelectParams& params, const PageSelection& selection,
                          std::span<float> mass, Executor& executor);

}  // namespace kvasir::kernels
