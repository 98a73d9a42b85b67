// The kernels of quest_cuda.h. Only quest_cuda.cc includes it, after it has checked the shapes.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "kernels/sparse/common/select_cuda.h"

namespace kvasir::kernels {

// Chooses by `scores` of the candidates, [rows, max_blocks_per_slot] of OrderedScore (ranking.h),
// in device memory.
cudaError_t LaunchQuestBest(const SelectLaunch& params, const uint32_t* scores,
                            cudaStream_t stream);

// Scores pages with `low_weight` (quest_rule.h) and chooses, in one kernel. REQUIRES:
// QuestPlan::is_one_kernel.
cudaError_t LaunchQuestDecode(const SelectLaunch& params, float low_weight, cudaStream_t stream);

}  // namespace kvasir::kernels
