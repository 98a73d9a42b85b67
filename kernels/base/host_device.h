// Marks functions that run on host and device: layout arithmetic, state merges.
#pragma once

#include <bit>
#include <cstdint>

#if defined(__CUDACC__)
#define KVASIR_HOST_DEVICE __host__ __device__
#else
#define KVASIR_HOST_DEVICE
#endif

namespace kvasir::kernels {

KVASIR_HOST_DEVICE inline int CountBits(uint64_t mask) {
#if defined(__CUDA_ARCH__)
  return __popcll(mask);
#else
  return std::popcount(mask);
#endif
}

}  // namespace kvasir::kernels
