// AppendHeads on the GPU: the op of append_heads.h in one launch. q, pages, bounds and key codes
// get the same bytes as on the CPU, except that the squares of normalized heads are summed in
// another order. All pointers of the params, spans included, are device memory. k and v are not
// used. Called by the CUDA backend. Thread-safe. Only in builds with CUDA.
//
// The checks of append.h on host memory cannot be made here. REQUIRES: the tiles pass
// CheckQueryTiles (query_tile_check.h). A page that is not in the device tier sets the slot's
// fault, and its tokens are not written; all others are.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>
#include <span>

#include "absl/status/status.h"

#include "kernels/append/append_heads.h"
#include "kernels/dense/dense_cuda.h"

namespace kvasir::kernels {

// Widest key that can be coded on the GPU: one word of eight codes a lane.
inline constexpr int64_t kMaxCudaHeadDim = 256;

// `angles` holds the angles of the step's tokens, or is null when keys are cached un-rotated.
// `faults`: [num_slots]. Allocates nothing and waits for nothing; may be captured. INVALID_ARGUMENT
// on shapes, tensors in host memory and a head_dim above kMaxCudaHeadDim; INTERNAL with CUDA's
// error when the launch fails. Cost: reads and writes qkv once, and writes bounds and codes.
absl::Status AppendHeads(const AppendHeadsParams& params, const RopeAngles* angles,
                         std::span<uint8_t> faults, cudaStream_t stream);

}  // namespace kvasir::kernels
