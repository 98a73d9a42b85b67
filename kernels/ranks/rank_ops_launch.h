// Kernels of rank_ops_cuda.h. Only rank_ops_cuda.cc includes this header, after its checks.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "kernels/base/dtype.h"
#include "kernels/ranks/rank_ops_cuda.h"

namespace kvasir::kernels {

struct PeerSumLaunch {
  PeerSumEnd end;
  const float* x;  // [count]
  BFloat16* y;     // [count]
  int64_t count;   // 1 to kPeerSumElements
};

struct AddLaunch {
  const float* x;  // [count]
  BFloat16* y;     // [count]
  int64_t count;   // at least 1
  uint32_t* progress;
};

struct PlaceLaunch {
  const void* gathered;  // [num_ranks][rows][width]; the last rank's rows are [width or fewer]
  void* y;               // [rows][columns]
  int64_t rows, width, columns, first_rank;
  int64_t element_bytes;  // 2 or 4
  uint32_t* progress;
};

cudaError_t LaunchPeerSum(const PeerSumLaunch& p, cudaStream_t stream);
cudaError_t LaunchAdd(const AddLaunch& p, cudaStream_t stream);
cudaError_t LaunchPlace(const PlaceLaunch& p, cudaStream_t stream);

}  // namespace kvasir::kernels
