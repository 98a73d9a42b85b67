// Compiled for AVX2; see the warning in simd_units.h. The vectors are included before the functions
// that use them.
// clang-format off
#include "kernels/simd/simd_avx2.h"
#include "kernels/sparse/page_scores/quest_score_simd.h"
// clang-format on

namespace kvasir::kernels {

void QuestScoresAvx2Float32(const QuestScoreParams& p, const std::byte* const* bounds,
                            float* scores) {
  ScoresOfFloat32(p, bounds, scores);
}

void QuestScoresAvx2BFloat16(const QuestScoreParams& p, const std::byte* const* bounds,
                             float* scores) {
  ScoresOfBFloat16(p, bounds, scores);
}

}  // namespace kvasir::kernels
