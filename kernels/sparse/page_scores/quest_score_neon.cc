// For Arm; see the warning in simd_units.h. The vectors are included before the functions that use
// them.
// clang-format off
#include "kernels/simd/simd_neon.h"
#include "kernels/sparse/page_scores/quest_score_simd.h"
// clang-format on

namespace kvasir::kernels {

void QuestScoresNeonFloat32(const QuestScoreParams& p, const std::byte* const* bounds,
                            float* scores) {
  ScoresOfFloat32(p, bounds, scores);
}

void QuestScoresNeonBFloat16(const QuestScoreParams& p, const std::byte* const* bounds,
                             float* scores) {
  ScoresOfBFloat16(p, bounds, scores);
}

}  // namespace kvasir::kernels
