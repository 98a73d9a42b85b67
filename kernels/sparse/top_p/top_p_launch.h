// The kernels behind top_p_cuda.h. Only top_p_cuda.cc includes it, after it has checked the shapes.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "kernels/sparse/select_cuda.h"

namespace kvasir::kernels {

// How many tokens of a row compete, and how many more there are in sink and window. None compete
// where the row is left as it is.
struct TopPCounts {
  int32_t competing = 0;
  int32_t mandatory = 0;
};

// All pointers are device memory.
struct TopPLaunch {
  SelectLaunch select = {};
  int64_t max_tokens = 0;        // of a row
  TopPCounts* counts = nullptr;  // [rows]
  int32_t* offsets = nullptr;    // [rows, capacity]: competing tokens of the entries before
  float* weights = nullptr;      // [rows, group, max_tokens]: competing tokens, then the others
};

cudaError_t LaunchTopP(const TopPLaunch& params, cudaStream_t stream);

}  // namespace kvasir::kernels
