// The pruner `top_p` (top_p_pruner.h) on the GPU: the same weights, threshold and tokens, over
// lists in device memory. All pointers of the params, including spans, are device memory; the
// faults are not used. Called through cuda_selector.h. Thread-safe. Only in builds with CUDA.
//
// With params.device_rope set, queries and codes are un-rotated and rows have their compact
// positions.
//
// Weights are float32 with another rounding than on the CPU: a token whose weight is practically
// equal to the threshold may be kept by one and not by the other. Other differences from the CPU:
// `live` must equal `chosen`, as selectors leave it; and a row that attends to more tokens than the
// workspace was made for, or than two million, is left unchanged. A row depends on nothing but
// itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cuda_runtime_api.h>
#include <memory>

#include "absl/status/status.h"

#include "kernels/sparse/common/cuda_selector.h"
#include "kernels/sparse/common/stages.h"

namespace kvasir::kernels {

// Bytes of device memory that PruneTopP needs for `blocks` query tiles over lists of `capacity`
// entries a row. `max_tokens` bounds sink + window + listed tokens of a row.
int64_t TopPWorkspaceBytes(const KvLayout& layout, int64_t group, int64_t blocks, int64_t capacity,
                           int64_t max_tokens);

// Launches one kernel, allocates nothing and waits for nothing; may be captured. INVALID_ARGUMENT
// on shapes: head_dim 64 or 128, at most 8 query heads a KV head. FAILED_PRECONDITION when the KV
// has no key codes. INTERNAL with CUDA's error when a launch fails. numbers.top_p must be above 0,
// which is not checked here. Cost: reads head_dim / 2 + 4 bytes per attended token. Where a row's
// weights do not fit in shared memory, also writes and reads 4 bytes of the excess tokens for each
// head of the group.
absl::Status PruneTopP(const CudaSelectParams& params, const PageSelection& selection,
                       int64_t max_tokens, std::byte* workspace, cudaStream_t stream);

std::unique_ptr<CudaPruner> MakeCudaTopP();

}  // namespace kvasir::kernels
