// The pruner `top_p` (Twilight, arXiv 2502.02770) keeps of the chosen tokens the fewest whose
// estimated attention mass, with sink and window, reaches top_p. For one query head of a row:
//
//   l_j   = scale * q . k~_j         from key codes, for j in C (chosen, between sink and window)
//                                    and in M (sink and window), at the positions of attention
//   w_j   = exp(l_j - max l)
//   need  = top_p * (1 - 1e-6) * (sum over C and M of w) - sum over M of w
//   kept  = { j in C : w_j >= t },   t the largest float32 with sum over kept of w_j >= need;
//                                    none when need <= 0
//
// `live` of the row is all that any head of the KV group keeps. t is found by bisection on the bits
// of the floats, which order as the floats do: exact, at most 31 rounds; equal weights stay
// together. Sums are float64. Sink and window are always attended to and count: other tokens need
// not hold the mass that they hold. p is relative to the selection, not to the context, so a poor
// selection stays poor. A token whose estimate is NaN is kept. Left unchanged: rows of kind kAll,
// rows of several queries, rows with top_p of 1 or more (or NaN), and tokens of entries that lie in
// sink or window. Errors: INVALID_ARGUMENT on shapes or top_p <= 0, FAILED_PRECONDITION without key
// codes. Cost: reads head_dim / 2 + 4 bytes per token that is chosen or in sink or window; 4 bytes
// of scratch per such token and head of the group. Thread-compatible.
#pragma once

#include "kernels/sparse/common/stages.h"

namespace kvasir::kernels {

class TopPPruner : public Pruner {
 public:
  absl::Status Prune(const SelectParams& params, PageSelection& selection,
                     Executor& executor) const override;
  bool NeedsKeyCodes() const override { return true; }
};

}  // namespace kvasir::kernels
