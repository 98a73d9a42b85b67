// Kernel of count_selected_cuda.h. Only count_selected_cuda.cc includes this header, after its
// checks.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "kernels/paged/count_selected_cuda.h"

namespace kvasir::kernels {

struct CountLaunch {
  const QueryBlock* blocks;
  PageSelection selection;  // at least one row
  int64_t num_kv_heads;
  SelectedCounts* counts;  // [num_rows]
};

cudaError_t LaunchCountSelected(const CountLaunch& p, cudaStream_t stream);

}  // namespace kvasir::kernels
