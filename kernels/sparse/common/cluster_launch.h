// Launches kernels that run a cluster of CTAs for each row (cluster_select.cuh), with the largest
// cluster at which all rows run at once. Only for .cu files.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/base/multiprocessors.h"
#include "kernels/base/overlapped_launch.h"

namespace kvasir::kernels {

inline constexpr unsigned kMaxClusterBlocks = 16;

template <typename... Params>
struct RowKernel {
  void (*kernel)(Params...);
  unsigned threads = 0;
  size_t shared_bytes = 0;  // dynamic
};

// Writes the number of CTAs in a row's cluster to `blocks` and prepares the kernel for it.
// Multiprocessors lie in groups that a cluster cannot span, and the groups differ in size.
template <typename... Params>
cudaError_t FindClusterBlocks(const RowKernel<Params...>& row_kernel, int64_t rows,
                              unsigned& blocks) {
  int processors = 0;
  if (const cudaError_t error = CountMultiprocessors(processors); error != cudaSuccess) {
    return error;
  }
  if (const cudaError_t error = cudaFuncSetAttribute(
          row_kernel.kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
      error != cudaSuccess) {
    return error;
  }
  blocks =
      static_cast<unsigned>(std::clamp<int64_t>(processors / rows, 1, int64_t{kMaxClusterBlocks}));
  if (const cudaError_t error = AllowSharedBytes(row_kernel.kernel, row_kernel.shared_bytes);
      error != cudaSuccess) {
    return error;
  }
  for (; blocks > 1; --blocks) {
    cudaLaunchAttribute attribute = {.id = cudaLaunchAttributeClusterDimension};
    attribute.val.clusterDim = {.x = blocks, .y = 1, .z = 1};
    const cudaLaunchConfig_t config = {.gridDim = static_cast<unsigned>(rows) * blocks,
                                       .blockDim = row_kernel.threads,
                                       .dynamicSmemBytes = row_kernel.shared_bytes,
                                       .attrs = &attribute,
                                       .numAttrs = 1};
    int clusters = 0;
    if (const cudaError_t error =
            cudaOccupancyMaxActiveClusters(&clusters, row_kernel.kernel, &config);
        error != cudaSuccess) {
      return error;
    }
    if (clusters >= rows) return cudaSuccess;
  }
  return cudaSuccess;
}

template <typename... Params, typename... Arguments>
cudaError_t LaunchRowClusters(const RowKernel<Params...>& row_kernel, int64_t rows,
                              cudaStream_t stream, const Arguments&... arguments) {
  unsigned blocks = 1;
  if (const cudaError_t error = FindClusterBlocks(row_kernel, rows, blocks); error != cudaSuccess) {
    return error;
  }
  return LaunchOverlappedClusters(row_kernel.kernel, blocks, static_cast<unsigned>(rows) * blocks,
                                  row_kernel.threads, row_kernel.shared_bytes, stream,
                                  arguments...);
}

}  // namespace kvasir::kernels
