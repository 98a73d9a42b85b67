// Kernel of compact_positions_cuda.h. Only compact_positions_cuda.cc includes this header.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/paged/page_selection.h"

namespace kvasir::kernels {

// REQUIRES: at least one row.
cudaError_t LaunchAssignPositions(const PageSelection& selection, cudaStream_t stream);

}  // namespace kvasir::kernels
