// Compact positions (compact_positions.h) given on the GPU, where the lists lie: behind a selector,
// before pruners. All pointers are device memory. Called by the attention layer. Thread-safe. Only
// in builds with CUDA.
#pragma once

#include <cuda_runtime_api.h>

#include "absl/status/status.h"

#include "kernels/paged/page_selection.h"

namespace kvasir::kernels {

// As AssignPositions on the host. Nothing is allocated or waited for; may be captured. INTERNAL
// with CUDA's error when the launch fails. Cost: reads and writes the lists once.
absl::Status AssignPositions(const PageSelection& selection, cudaStream_t stream);

}  // namespace kvasir::kernels
