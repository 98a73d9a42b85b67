// The kernels of top_p_cuda.h. Only top_p_cuda.cc includes it, after it has checked the shapes.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "kernels/sparse/common/select_cuda.h"

namespace kvasir::kernels {

// All pointers are device memory.
struct TopPLaunch {
  SelectLaunch select = {};
  int64_t max_tokens = 0;     // of a row
  uint32_t* slots = nullptr;  // [rows, capacity]: places of the entries' weights, for long lists
  float* weights = nullptr;   // [rows, group, max_tokens], those not in shared memory
  // From TopPPlan; blocks are CTAs.
  int log_blocks_of_row = 0;
  unsigned blocks_of_row = 1;   // 2^log_blocks_of_row
  unsigned heads_of_block = 1;  // heads whose weights a CTA has
  uint32_t shared_tokens = 0;   // tokens whose weights are in shared memory
  int64_t items_at_once = 0;    // pages that a CTA works on at once
};

cudaError_t LaunchTopP(const TopPLaunch& params, cudaStream_t stream);

}  // namespace kvasir::kernels
