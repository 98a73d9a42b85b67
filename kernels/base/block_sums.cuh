// Sums over the threads of a CTA.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/base/warp.cuh"

namespace kvasir::kernels {

// Returns the sum of `value` over the threads before this one. All threads of the CTA call it. All
// sums stay below 2^32 or 2^64, for a Number of uint32_t or uint64_t. `sums` is shared memory, one
// number for each warp. After the next __syncthreads it holds each warp's own sum.
template <typename Number>
__device__ inline Number SumBefore(std::type_identity_t<Number> value, Number* sums) {
  const unsigned lane = threadIdx.x % kWarpThreads;
  const unsigned warp = threadIdx.x / kWarpThreads;
  Number sum = value;
#pragma unroll
  for (unsigned distance = 1; distance < kWarpThreads; distance *= 2) {
    const Number left = __shfl_up_sync(kAllLanes, sum, distance);
    if (lane >= distance) sum += left;
  }
  __syncthreads();  // the sums of the previous call have been read
  if (lane == kWarpThreads - 1) sums[warp] = sum;
  __syncthreads();
  Number before = sum - value;
  Number earlier = lane < warp ? sums[lane] : 0;
  if constexpr (sizeof(Number) == sizeof(uint32_t)) {
    earlier = __reduce_add_sync(kAllLanes, earlier);
  } else {
    for (int distance = kWarpThreads / 2; distance > 0; distance /= 2) {
      earlier += __shfl_xor_sync(kAllLanes, earlier, distance);
    }
  }
  before += earlier;
  return before;
}

}  // namespace kvasir::kernels
