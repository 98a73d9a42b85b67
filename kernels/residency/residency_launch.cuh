// Shared by the kernels of residency: numbers of threads and warps, and the status of a launch.
// Only the files of this folder include it.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

#include "kernels/base/cuda_status.h"
#include "kernels/base/warp.cuh"

namespace kvasir::kernels {

inline constexpr int kWideBlocks = 256;  // CTAs where all multiprocessors are free to use

inline __device__ int64_t Thread() { return static_cast<int64_t>(threadIdx.x); }
inline __device__ int64_t NumThreads() { return static_cast<int64_t>(blockDim.x); }

// Units of work of a warp: every UnitStride()-th from FirstUnit() on.
inline __device__ int64_t FirstUnit() {
  return (static_cast<int64_t>(blockIdx.x) * NumThreads() + Thread()) / kWarpThreads;
}
inline __device__ int64_t UnitStride() {
  return static_cast<int64_t>(gridDim.x) * NumThreads() / kWarpThreads;
}

inline absl::Status Launched(absl::string_view op) { return CudaStatus(cudaGetLastError(), op); }

}  // namespace kvasir::kernels
