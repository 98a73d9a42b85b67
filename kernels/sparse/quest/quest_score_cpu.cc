#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/sparse/quest/quest_score.h"

namespace kvasir::kernels {
namespace {

template <typename Kv>
float Score(const QuestScoreParams& p, const Kv* bounds) {
  float best = -std::numeric_limits<float>::infinity();
  for (int64_t query = 0; query < p.num_queries; ++query) {
    const float* q = p.signed_q + query * 2 * p.head_dim;
    float sum = 0;
    for (int64_t i = 0; i < 2 * p.head_dim; ++i) sum += q[i] * static_cast<float>(bounds[i]);
    if (std::isnan(sum)) return sum;
    best = std::max(best, sum);
  }
  return best;
}

}  // namespace

void QuestScoresReference(const QuestScoreParams& p, const std::byte* const* bounds, int64_t count,
                          float* scores) {
  for (int64_t i = 0; i < count; ++i) {
    if (bounds[i] == nullptr) {
      scores[i] = -std::numeric_limits<float>::infinity();
    } else if (p.dtype == DType::kFloat32) {
      scores[i] = Score(p, reinterpret_cast<const float*>(bounds[i]));
    } else {
      scores[i] = Score(p, reinterpret_cast<const BFloat16*>(bounds[i]));
    }
  }
}

}  // namespace kvasir::kernels
