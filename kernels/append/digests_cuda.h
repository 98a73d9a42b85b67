// RebuildBounds on the GPU: the op of digests.h for several blocks at once, with the same bytes.
// All pointers, the span included, are device memory. Called at the start of a step, before
// anything is appended. Thread-safe. Only in builds with CUDA.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>
#include <span>

#include "absl/status/status.h"

#include "kernels/append/digests.h"

namespace kvasir::kernels {

// REQUIRES: the slots and blocks are bound. A page that is not in the device tier sets the slot's
// fault and keeps its bounds. Allocates nothing and waits for nothing. INVALID_ARGUMENT on a KV
// without bounds or a head_dim above 1,024; INTERNAL with CUDA's error when the launch fails.
absl::Status RebuildBounds(const PagedKv& kv, std::span<const BlockKeys> blocks,
                           std::span<uint8_t> faults, cudaStream_t stream);

}  // namespace kvasir::kernels
