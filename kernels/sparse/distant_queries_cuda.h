// Queries for selectors on the GPU where keys are cached un-rotated: each rotated to the distance
// at which a selector sees all candidates alike, so that kernels multiply them with keys, bounds
// and codes as they are cached. On the CPU this is RotateToDistance (key_logits.h), which leaves
// them in float32; here they are rounded to the dtype of q, as queries are that the model rotates.
// All pointers are device memory. Called before a selector. Thread-safe. Only in builds with CUDA.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "absl/status/status.h"

#include "kernels/sparse/stages.h"

namespace kvasir::kernels {

// Of query r of a block: window_tokens - within_window, and r more where it counts from the query's
// own window. {} is SelectionDistance
// (select_common.h).
struct QueryDistance {
  int64_t within_window = 0;
  bool of_own_window = true;
};

// to [tokens, heads, head_dim] of q's dtype: rows of the call's blocks are written. REQUIRES:
// params.device_rope knows the distances. INVALID_ARGUMENT on shapes. Nothing is allocated or
// waited for; may be captured.
absl::Status RotateToDistance(const SelectParams& params, const QueryDistance& distance,
                              const TensorView& to, cudaStream_t stream);

}  // namespace kvasir::kernels
