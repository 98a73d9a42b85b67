// The kernel of streaming_cuda.h. Only streaming_cuda.cc includes it, after it has checked the
// shapes.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/sparse/common/select_cuda.h"

namespace kvasir::kernels {

cudaError_t LaunchStreaming(const SelectLaunch& params, cudaStream_t stream);

}  // namespace kvasir::kernels
