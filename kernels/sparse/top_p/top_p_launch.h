// The kernels behind top_p_cuda.h. Only top_p_cuda.cc includes it, after it has checked the shapes.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "kernels/sparse/select_cuda.h"

namespace kvasir::kernels {

// All pointers are device memory.
struct TopPLaunch {
  SelectLaunch select = {};
  int64_t max_tokens = 0;     // of a row
  uint32_t* slots = nullptr;  // [rows, capacity]: where the weights of entries lie, of long lists
  float* weights = nullptr;   // [rows, group, max_tokens], those not in shared memory
  // How LaunchTopP cuts a row.
  unsigned blocks_of_row = 1;  // a power of two
  int64_t shared_tokens = 0;   // whose weights lie in shared memory
  int64_t items_at_once = 0;   // pages of a block

  KVASIR_HOST_DEVICE int64_t heads_of_block() const {
    return (select.group + blocks_of_row - 1) / blocks_of_row;
  }
};

cudaError_t LaunchTopP(const TopPLaunch& params, cudaStream_t stream);

}  // namespace kvasir::kernels
