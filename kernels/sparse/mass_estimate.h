// How much of its attention mass a query keeps under a selection, estimated before attention reads
// anything. For a query head of a row with attended tokens A, of all tokens up to the query:
//
//   l_j    = scale * q . k_j           exact, for j in A
//   l~_j   = scale * q . k~_j          from key codes (kernels/paged/key_codes.h), for all others
//   mass   = sum over A of exp(l_j) / (sum over A of exp(l_j) + sum over the others of exp(l~_j))
//
// The error is that of the codes of what is not attended to; it is calibrated in docs/quality.md.
// Where keys are cached un-rotated there is no dense attention to keep mass of: all tokens between
// sink and window, attended to or not, then stand at the distance at which selectors see them
// (SelectionDistance), sink and window at their compact positions. Sums are float64 in ascending
// position, attended tokens first: an estimate depends on its row alone.
// Cost: reads the attended keys, and head_dim / 2 + 4 bytes of every other token. Thread-safe.
#pragma once

#include <span>

#include "absl/status/status.h"

#include "kernels/sparse/stages.h"

namespace kvasir::kernels {

// `params` as of the Select call that filled `selection`, pruned or not; where keys are un-rotated,
// positions are assigned. mass [rows, heads of a KV head's group]: 1 for rows of kind all, NaN
// (unknown) for rows of several queries and slots with a fault. INVALID_ARGUMENT on shapes,
// FAILED_PRECONDITION without key codes.
absl::Status EstimateMass(const SelectParams& params, const PageSelection& selection,
                          std::span<float> mass, Executor& executor);

}  // namespace kvasir::kernels
