// The selector `quest` (quest_selector.h) on the GPU: the same scores, order and lists, in device
// memory where the attention kernels read them. All pointers of the params, including spans, are
// device memory. Where keys are cached un-rotated, q is the output of RotateToDistance
// (distant_queries_cuda.h). Called through cuda_selector.h. Thread-safe. Only in builds with CUDA.
//
// Scores are float32 sums in another order than on the CPU. Where the scores of the last page kept
// and the first one dropped are practically equal, either may be chosen. A row with more pages in
// its budget than `out` has room for gets the best of them. A row depends on nothing but itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cuda_runtime_api.h>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/sparse/common/cuda_selector.h"
#include "kernels/sparse/common/method_options.h"
#include "kernels/sparse/common/stages.h"
#include "kernels/sparse/page_scores/quest_rule.h"

namespace kvasir::kernels {

// Bytes of device memory that SelectQuest needs for `blocks` query tiles: a score per page and KV
// head.
int64_t QuestWorkspaceBytes(const PagedKv& kv, int64_t blocks);

// REQUIRES: query tiles pass CheckQueryTiles, numbers are as Selector::Select wants them, and a
// page's bounds are aligned to 16 bytes. Allocates nothing and waits for nothing; may be captured.
// INVALID_ARGUMENT on shapes: head_dim 64 or 128, q float32 or bfloat16, KV of IsKvDType.
// FAILED_PRECONDITION when the KV has no bounds. INTERNAL with CUDA's error when the launch fails.
// Cost: reads the candidates' bounds once for all queries of a tile. One kernel where all query
// tiles of the step are one token, in bfloat16; else two, with a score of 4 bytes a page between
// them. Where nothing is remembered, the first may read bounds before the kernel ahead of it has
// ended (page_stream.cuh says which, and why).
absl::Status SelectQuest(QuestScore score, const CudaSelectParams& params, const PageSelection& out,
                         std::byte* workspace, cudaStream_t stream);

// INVALID_ARGUMENT as for QuestSelector::Create.
absl::StatusOr<std::unique_ptr<CudaSelector>> MakeCudaQuest(const MethodOptions& options);

}  // namespace kvasir::kernels
