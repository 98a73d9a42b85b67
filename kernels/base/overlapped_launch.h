// Launches kernels whose CTAs may begin while the previous kernel on the stream still runs. Such a
// kernel first reads only memory that no kernel writes, such as weights. Then all threads of all
// CTAs wait (cudaGridDependencySynchronize) before anything else. They begin when the previous
// kernel calls cudaTriggerProgrammaticLaunchCompletion, or else when it ends. Works in graphs and
// on streams. Only in .cu files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cuda_runtime.h>
#include <mutex>

namespace kvasir::kernels {

// Lets CTAs of the kernel have so much dynamic shared memory, before a launch that asks for more
// than 48 KiB. What one thread was allowed no other takes back, also where both use one GPU.
template <typename... Params>
cudaError_t AllowSharedBytes(void (*kernel)(Params...), int64_t shared_bytes) {
  static std::mutex mutex;
  const std::scoped_lock lock(mutex);
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
  if (error != cudaSuccess || attributes.maxDynamicSharedSizeBytes >= shared_bytes) return error;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(shared_bytes));
}

// Launches clusters of `cluster_blocks` CTAs, side by side in x.
template <typename... Params, typename... Arguments>
cudaError_t LaunchOverlappedClusters(void (*kernel)(Params...), unsigned cluster_blocks,
                                     dim3 blocks, dim3 threads, size_t shared_bytes,
                                     cudaStream_t stream, const Arguments&... arguments) {
  cudaLaunchAttribute attributes[2] = {{.id = cudaLaunchAttributeProgrammaticStreamSerialization},
                                       {.id = cudaLaunchAttributeClusterDimension}};
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].val.clusterDim = {.x = cluster_blocks, .y = 1, .z = 1};
  const cudaLaunchConfig_t config = {.gridDim = blocks,
                                     .blockDim = threads,
                                     .dynamicSmemBytes = shared_bytes,
                                     .stream = stream,
                                     .attrs = attributes,
                                     .numAttrs = 2};
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

template <typename... Params, typename... Arguments>
cudaError_t LaunchOverlapped(void (*kernel)(Params...), dim3 blocks, dim3 threads,
                             size_t shared_bytes, cudaStream_t stream,
                             const Arguments&... arguments) {
  return LaunchOverlappedClusters(kernel, 1, blocks, threads, shared_bytes, stream, arguments...);
}

}  // namespace kvasir::kernels
