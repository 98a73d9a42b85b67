// The algebra of partial attention results: (max, sum, weighted values) over a set of keys, and the
// merge of two disjoint sets. Written once for tiles, splits, ranks and the terminator. A state
// over no keys has max = -inf, sum = 0, and is the neutral element of a merge, without NaN. A NaN
// logit never raises max but makes sum NaN, and every merge keeps it.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

namespace kvasir::kernels {

// One query's partial result. The caller holds `out` (head_dim floats, un-normalised).
struct AttentionState {
  float max = -std::numeric_limits<float>::infinity();  // of the scaled logits
  float sum = 0;                                        // of exp(logit - max)
};

// The factors of both sides' `sum` and `out` in a merge.
struct MergeWeights {
  float left = 0;
  float right = 0;
};

// Merges `right` into `left` and returns the weights for the out vectors:
//   out = weights.left * out_left + weights.right * out_right.
// The order of merges is part of the result's bits: callers merge in reading order.
inline MergeWeights MergeInto(AttentionState& left, const AttentionState& right) {
  const float max = left.max > right.max ? left.max : right.max;
  if (max == -std::numeric_limits<float>::infinity()) {
    // No key on either side, or only NaN logits: adding keeps 0 and NaN as they are.
    left.sum += right.sum;
    return {.left = 1, .right = 1};
  }
  const MergeWeights weights = {.left = std::exp(left.max - max),
                                .right = std::exp(right.max - max)};
  left.sum = weights.left * left.sum + weights.right * right.sum;
  left.max = max;
  return weights;
}

// Returns log(sum over the keys of exp(logit)): -inf over no keys, NaN after a NaN logit.
inline float LogSumExp(const AttentionState& state) {
  return state.sum == 0 ? -std::numeric_limits<float>::infinity() : state.max + std::log(state.sum);
}

}  // namespace kvasir::kernels
