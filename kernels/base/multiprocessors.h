// Number of multiprocessors of the GPU, which sets the number of CTAs of a launch. Only in builds
// with CUDA.
#pragma once

#include <cuda_runtime_api.h>

namespace kvasir::kernels {

// Sets `count` to the number on the calling thread's current device. Cheap, and allowed while a
// stream is being captured.
inline cudaError_t CountMultiprocessors(int& count) {
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  return cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
}

}  // namespace kvasir::kernels
