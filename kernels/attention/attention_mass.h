// Attention mass kept: the share of a query's dense softmax weight that lies on the keys a sparse
// run attended to. Since the sparse keys are a subset of the dense ones, it is
//
//   mass = sum_{j in sparse} exp(l_j) / sum_{j in dense} exp(l_j) = exp(lse_sparse - lse_dense)
//
// with lse of Attend over the same query and the same KV. l_j is the logit of token j at the
// position where attention reads it: its own position, or its grouped one on j's own side of the
// neighbourhood, whether or not j was selected. At compact positions an unselected token has no
// position, so this mass is undefined. The error is that of both lse (about 1e-6 relative in
// float32), so the mass may exceed 1 before it is clamped. Thread-safe.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

namespace kvasir::kernels {

// Returns the mass of one (token, head). A query without keys keeps everything: 1. NaN in, NaN out:
// an unknown mass is never reported as 1.
inline float AttentionMassKept(float lse_sparse, float lse_dense) {
  if (lse_dense == -std::numeric_limits<float>::infinity()) return 1;
  return std::clamp(std::exp(lse_sparse - lse_dense), 0.0f, 1.0f);
}

}  // namespace kvasir::kernels
