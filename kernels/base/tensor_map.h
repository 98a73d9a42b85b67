// Tensor maps by which the GPU's copy engine finds boxes of bfloat16 matrices in device memory, or
// in host memory that it reads. A box of rows of 128 bytes lies in shared memory swizzled, as wgmma
// reads it (hopper.cuh). Passed to kernels by value. Only in builds with CUDA.
#pragma once

#include <cstdint>
#include <cuda.h>

#include "absl/status/statusor.h"

namespace kvasir::kernels {

// Columns of a box: a swizzled row of shared memory (128 bytes).
inline constexpr int64_t kBoxColumns = 64;

// Dimensions, the fastest first.
struct TensorMapShape {
  uint32_t rank = 0;
  cuuint64_t sizes[4];    // elements
  cuuint64_t strides[3];  // bytes, of all dimensions but the first: multiples of 16
  cuuint32_t box[4];      // elements, at most 256 each
};

// `base` is aligned to 16 bytes. What of a box is beyond the sizes is copied as zeros.
// UNAVAILABLE: the driver is too old. INTERNAL: it refuses the shape.
absl::StatusOr<CUtensorMap> MakeTensorMap(void* base, const TensorMapShape& shape);

}  // namespace kvasir::kernels
