// The selector `tokenselect` (tokenselect_selector.h) on the GPU: the same votes, order and lists,
// in device memory where the attention kernels read them. All pointers of the params, including
// spans, are device memory. Where keys are cached un-rotated, q is the output of RotateToDistance
// (distant_queries_cuda.h). Called through cuda_selector.h. Thread-safe. Only in builds with CUDA.
//
// Votes are float32 with another rounding than on the CPU. Where the votes of the last token kept
// and the first one dropped are practically equal, either may be chosen; at layer scope all rows of
// a query tile get the same one, on however many ranks they are. A row whose list has no room in
// `out` gets its first pages. A row depends on nothing but itself; at layer scope, on its query
// tile.
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

// Bytes of device memory that SelectTokens needs for `blocks` query tiles: mostly 4 (max(G, 2) + 1)
// a row and token that a slot can hold, where G is the number of heads of a group.
int64_t TokenSelectWorkspaceBytes(Scope scope, const PagedKv& kv, int64_t group, int64_t blocks);

// Launches two kernels, at layer scope three, which begin while the one ahead of them on the stream
// ends (overlapped_launch.h); where ranks choose together (params.part), they sum votes after the
// second. Allocates nothing and waits for nothing; may be captured. INVALID_ARGUMENT on shapes:
// head_dim 64 or 128, q float32 or bfloat16, KV of IsKvDType, at most 8 query heads a KV head,
// 1,024 of a layer and 6,291,456 tokens a slot. INTERNAL with CUDA's error when a launch fails. An
// absent page sets the slot's fault. Cost: reads every candidate's key once, its logits twice.
absl::Status SelectTokens(Scope scope, const CudaSelectParams& params, const PageSelection& out,
                          std::byte* workspace, cudaStream_t stream);

// INVALID_ARGUMENT as for TokenSelectSelector::Create.
absl::StatusOr<std::unique_ptr<CudaSelector>> MakeCudaTokenSelect(const MethodOptions& options);

}  // namespace kvasir::kernels
