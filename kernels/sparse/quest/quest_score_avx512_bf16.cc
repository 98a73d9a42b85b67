// Compiled for AVX-512 with BF16; see the warning in avx512_tile.h.
#include "kernels/sparse/quest/quest_score_avx512.h"

namespace kvasir::kernels {

void QuestScoresAvx512Bf16Pairs(const QuestScoreParams& p, const std::byte* const* bounds,
                                float* scores) {
  TransposeBounds(bounds, 2 * p.head_dim * 2, [&](int64_t pair, int64_t page, __m512i values) {
    _mm512_storeu_si512(p.workspace + (pair * kQuestScorePages + page) * 4, values);
  });
  ScoreTile<PairUnit>(p, p.workspace, bounds, scores);
}

}  // namespace kvasir::kernels
