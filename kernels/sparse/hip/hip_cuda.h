// The selector `hip` (hip_selector.h) on the GPU: the same search, order and lists, in device
// memory, where the attention kernels read them. All pointers of the params, spans included, are
// device memory; params.scratch is not used. Where keys are cached un-rotated, q is what
// RotateToDistance made (distant_queries_cuda.h). Called by the attention layer. Thread-safe. Only
// in builds with CUDA.
//
// Scores are float32 sums in another order than on the CPU: where those of the last half in and the
// first one out are as good as equal, either may be chosen, and what is found behind it. A row
// whose list has no room in `out` gets its first pages. A row depends on nothing but itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cuda_runtime_api.h>

#include "absl/status/status.h"

#include "kernels/sparse/stages.h"

namespace kvasir::kernels {

// How large a call may be; graphs are made for it.
struct HipCuda {
  int64_t max_budget_tokens = 0;  // of all rows
};

// Device memory that SelectHip needs for so many query blocks: 44 bytes a block of 2 tokens of the
// budget, and KV head.
int64_t HipWorkspaceBytes(const HipCuda& method, const PagedKv& kv, int64_t blocks);

// One kernel. Nothing is allocated or waited for; may be captured.
// INVALID_ARGUMENT on shapes: head_dim 64 or 128, q and KV float32 or bfloat16. INTERNAL with
// CUDA's error when a launch fails. An absent page sets the slot's fault. REQUIRES: budgets of the
// numbers within that of the method. Cost: reads at most 2 keys for each token of the budget in a
// round.
absl::Status SelectHip(const HipCuda& method, const SelectParams& params, const PageSelection& out,
                       std::byte* workspace, cudaStream_t stream);

}  // namespace kvasir::kernels
