// AppendHeads on the GPU: the op of append_heads.h in one launch, with the bytes of the CPU's in q,
// pages, bounds and key codes; where heads are normalized their squares are summed in another
// order. All pointers of the params, spans included, are device memory; k and v are not used.
// Called by the CUDA backend. Thread-safe. Only in builds with CUDA.
//
// What append.h checks in host memory cannot be looked at here. REQUIRES: blocks as
// CheckQueryBlocks (query_block_check.h) wants them. A page that is not in the device tier sets the
// slot's fault, and its tokens are written nowhere; the others are.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>
#include <span>

#include "absl/status/status.h"

#include "kernels/dense/dense_cuda.h"
#include "kernels/paged/append_heads.h"

namespace kvasir::kernels {

// Widest key of which codes are made on the GPU: one word of eight codes a lane.
inline constexpr int64_t kMaxCudaHeadDim = 256;

// `angles`: of the step's tokens; null: keys are cached un-rotated. `faults`: [num_slots]. Nothing
// is allocated or waited for; may be captured. INVALID_ARGUMENT on shapes, tensors in host memory
// and a head_dim above kMaxCudaHeadDim; INTERNAL with CUDA's error when the launch fails. Cost:
// reads qkv once and writes it once, bounds and codes beside.
absl::Status AppendHeads(const AppendHeadsParams& params, const RopeAngles* angles,
                         std::span<uint8_t> faults, cudaStream_t stream);

}  // namespace kvasir::kernels
