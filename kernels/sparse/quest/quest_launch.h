// The kernels behind quest_cuda.h. Only quest_cuda.cc includes it, after it has checked the shapes.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "kernels/sparse/select_cuda.h"

namespace kvasir::kernels {

// `scores` are of the candidates, [rows, max_blocks_per_slot] of OrderedScore (ranking.h), in
// device memory.
cudaError_t LaunchQuestBest(const SelectLaunch& params, const uint32_t* scores,
                            cudaStream_t stream);

// Scores, as `low_weight` of quest_rule.h says, and chooses at once. REQUIRES:
// PageScoreLaunch::of_one_token.
cudaError_t LaunchQuestDecode(const SelectLaunch& params, float low_weight, cudaStream_t stream);

}  // namespace kvasir::kernels
