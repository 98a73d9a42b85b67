#include <algorithm>
#include <limits>

#include "kernels/base/dtype.h"
#include "kernels/sparse/page_scores/quest_score.h"

namespace kvasir::kernels {
namespace {

template <typename Kv>
void Scores(const QuestScoreParams& p, const std::byte* const* bounds, float* scores) {
  for (int64_t i = 0; i < kQuestScorePages; ++i) {
    scores[i] = -std::numeric_limits<float>::infinity();
    if (bounds[i] == nullptr) continue;
    const Kv* page = reinterpret_cast<const Kv*>(bounds[i]);
    for (int64_t query = 0; query < p.num_queries; ++query) {
      const float* q = static_cast<const float*>(p.signed_q) + query * 2 * p.head_dim;
      float sum = 0;
      for (int64_t j = 0; j < 2 * p.head_dim; ++j) sum += q[j] * static_cast<float>(page[j]);
      scores[i] = std::max(scores[i], sum);  // leaves out NaN
    }
  }
}

}  // namespace

void QuestScoresFloat32(const QuestScoreParams& p, const std::byte* const* bounds, float* scores) {
  Scores<float>(p, bounds, scores);
}

void QuestScoresBFloat16(const QuestScoreParams& p, const std::byte* const* bounds, float* scores) {
  Scores<BFloat16>(p, bounds, scores);
}

}  // namespace kvasir::kernels
