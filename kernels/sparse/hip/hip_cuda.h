// The selector `hip` (hip_selector.h) on the GPU: the same search, order and lists, in device
// memory where the attention kernels read them. All pointers of the params, including spans, are
// device memory. Where keys are cached un-rotated, q is the output of RotateToDistance
// (distant_queries_cuda.h). Called through cuda_selector.h. Thread-safe. Only in builds with CUDA.
//
// Scores are float32 sums in another order than on the CPU. Where the scores of the last half kept
// and the first one dropped are practically equal, either may be chosen, with all that its search
// finds. A row whose list has no room in `out` gets its first pages. A row depends on nothing but
// itself.
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

namespace kvasir::kernels {

// The largest call; graphs are captured for it.
struct HipCuda {
  int64_t max_budget_tokens = 0;  // largest of any row
};

// Bytes of device memory that SelectHip needs for `blocks` query tiles: 44 per KV head and 2 tokens
// of the budget.
int64_t HipWorkspaceBytes(const HipCuda& method, const PagedKv& kv, int64_t blocks);

// Launches one kernel, allocates nothing and waits for nothing; may be captured. INVALID_ARGUMENT
// on shapes: head_dim 64 or 128, q float32 or bfloat16, KV of IsKvDType. INTERNAL with CUDA's error
// when a launch fails. An absent page sets the slot's fault. REQUIRES: the budgets in the numbers
// are at most the method's. Cost: reads at most 2 keys per token of the budget in a round.
absl::Status SelectHip(const HipCuda& method, const CudaSelectParams& params,
                       const PageSelection& out, std::byte* workspace, cudaStream_t stream);

// INVALID_ARGUMENT for any option.
absl::StatusOr<std::unique_ptr<CudaSelector>> MakeCudaHip(const MethodOptions& options);

}  // namespace kvasir::kernels
