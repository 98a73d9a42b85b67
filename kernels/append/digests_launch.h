// Kernel of digests_cuda.h. Only digests_cuda.cc includes this header, after its checks.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "kernels/append/digests_cuda.h"

namespace kvasir::kernels {

struct BoundsLaunch {
  PagedKv kv;
  const BlockKeys* blocks;  // [num_blocks], at least one
  int64_t num_blocks;
  uint8_t* faults;  // [num_slots]
};

cudaError_t LaunchRebuildBounds(const BoundsLaunch& p, cudaStream_t stream);

}  // namespace kvasir::kernels
