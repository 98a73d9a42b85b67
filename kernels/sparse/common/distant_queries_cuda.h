// Rotates queries for selectors on the GPU where keys are cached un-rotated. Each query is rotated
// to the distance at which a selector sees all candidates alike, so kernels multiply it with keys,
// bounds and codes as they are cached. On the CPU this is RotateToDistance (key_logits.h), which
// leaves queries in float32; here they are rounded to the dtype of q, as the model rounds the
// queries that it rotates. All pointers are device memory. Called before a selector. Thread-safe.
// Only in builds with CUDA.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "absl/status/status.h"

#include "kernels/sparse/common/cuda_selector.h"
#include "kernels/sparse/common/stages.h"

namespace kvasir::kernels {

// to [tokens, heads, head_dim] in q's dtype: rows of the call's query tiles are written. REQUIRES:
// params.device_rope has the distances. INVALID_ARGUMENT on shapes. Allocates nothing and waits for
// nothing; may be captured.
absl::Status RotateToDistance(const CudaSelectParams& params, const QueryDistance& distance,
                              const TensorView& to, cudaStream_t stream);

}  // namespace kvasir::kernels
