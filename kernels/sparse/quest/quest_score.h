// The page bounds' dot product behind QuestSelector, apart from it so that it can be replaced by
// vector code and compared. With q split by sign, sum_d max(q_d min_d, q_d max_d) is one dot
// product
//
//   score = (min(q, 0), max(q, 0)) . (min, max)
//
// of 2 * head_dim terms, and (min, max) is how a page's bounds lie in memory. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/base/dtype.h"

namespace kvasir::kernels {

struct QuestScoreParams {
  const float* signed_q = nullptr;  // [num_queries, 2 * head_dim]
  int64_t num_queries = 0;
  int64_t head_dim = 0;
  DType dtype = DType::kBFloat16;  // of the bounds
};

// score[i] = max over the queries of signed_q . bounds[i], for `count` pages, NaN if any of them
// is. bounds[i] may be null: -inf.
void QuestScoresReference(const QuestScoreParams& params, const std::byte* const* bounds,
                          int64_t count, float* scores);

}  // namespace kvasir::kernels
