// Compiled for AVX-512; see the warning in avx512_tile.h.
#include "kernels/sparse/quest/quest_score_avx512.h"

namespace kvasir::kernels {

void QuestScoresAvx512Float32(const QuestScoreParams& p, const std::byte* const* bounds,
                              float* scores) {
  TransposeBounds(bounds, 2 * p.head_dim * 4, [&](int64_t element, int64_t page, __m512i values) {
    _mm512_storeu_si512(p.workspace + (element * kQuestScorePages + page) * 4, values);
  });
  ScoreTile<FloatUnit>(p, p.workspace, bounds, scores);
}

void QuestScoresAvx512BFloat16(const QuestScoreParams& p, const std::byte* const* bounds,
                               float* scores) {
  TransposeBounds(bounds, 2 * p.head_dim * 2, [&](int64_t pair, int64_t page, __m512i values) {
    std::byte* to = p.workspace + (2 * pair * kQuestScorePages + page) * 4;
    _mm512_storeu_si512(to, FirstOfPairs(values));
    _mm512_storeu_si512(to + kQuestScorePages * 4, SecondOfPairs(values));
  });
  ScoreTile<FloatUnit>(p, p.workspace, bounds, scores);
}

}  // namespace kvasir::kernels
