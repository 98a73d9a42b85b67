// Sums over the threads of a block, for kernels.
#pragma once

#include <cstdint>

#include "kernels/base/warp.cuh"

namespace kvasir::kernels {

// The sum of `value` over the threads before this one, by all threads of the block. `sums` is
// shared memory, one for each warp; behind the next __syncthreads it holds what a warp adds.
__device__ inline uint64_t SumBefore(uint64_t value, uint64_t* sums) {
  const unsigned lane = threadIdx.x % kWarpThreads;
  const unsigned warp = threadIdx.x / kWarpThreads;
  uint64_t sum = value;
  for (unsigned distance = 1; distance < kWarpThreads; distance *= 2) {
    const uint64_t left = __shfl_up_sync(kAllLanes, sum, distance);
    if (lane >= distance) sum += left;
  }
  __syncthreads();  // the sums of an earlier call have been read
  if (lane == kWarpThreads - 1) sums[warp] = sum;
  __syncthreads();
  uint64_t before = sum - value;
  for (unsigned i = 0; i < warp; ++i) before += sums[i];
  return before;
}

// The same of numbers whose sum is below 2^32.
__device__ inline uint32_t SumBefore(uint32_t value, uint32_t* sums) {
  const unsigned lane = threadIdx.x % kWarpThreads;
  const unsigned warp = threadIdx.x / kWarpThreads;
  uint32_t sum = value;
#pragma unroll
  for (unsigned distance = 1; distance < kWarpThreads; distance *= 2) {
    const uint32_t left = __shfl_up_sync(kAllLanes, sum, distance);
    if (lane >= distance) sum += left;
  }
  __syncthreads();  // the sums of an earlier call have been read
  if (lane == kWarpThreads - 1) sums[warp] = sum;
  __syncthreads();
  return sum - value + __reduce_add_sync(kAllLanes, lane < warp ? sums[lane] : 0);
}

}  // namespace kvasir::kernels
