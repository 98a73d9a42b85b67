// Compiled for AVX-512 with BF16; see the warning in simd_units.h. The vectors are included before
// the functions that use them.
// clang-format off
#include "kernels/simd/simd_avx512.h"
#include "kernels/simd/simd_avx512_bf16.h"
#include "kernels/sparse/page_scores/quest_score_simd.h"
// clang-format on

namespace kvasir::kernels {

void QuestScoresAvx512Bf16Pairs(const QuestScoreParams& p, const std::byte* const* bounds,
                                float* scores) {
  TransposeBounds(bounds, 2 * p.head_dim * 2, [&](int64_t pair, int64_t page, Vec values) {
    StoreUnits(PlaceOf(p, pair, page), values);
  });
  ScoreTile<PairUnit>(p, bounds, scores);
}

}  // namespace kvasir::kernels
