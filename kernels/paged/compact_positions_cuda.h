// Assigns compact positions (compact_positions.h) on the GPU, where the lists lie: after a
// selector, before pruners. All pointers are device memory. Called by the CUDA backend
// (worker/backend/cuda/cuda_select.cc). Thread-safe. Only in builds with CUDA.
#pragma once

#include <cuda_runtime_api.h>

#include "absl/status/status.h"

#include "kernels/paged/page_selection.h"

namespace kvasir::kernels {

// Does what AssignPositions does on the host. Allocates nothing and waits for nothing; may be
// captured. INTERNAL with CUDA's error when the launch fails. Cost: reads and writes the lists
// once.
absl::Status AssignPositions(const PageSelection& selection, cudaStream_t stream);

}  // namespace kvasir::kernels
