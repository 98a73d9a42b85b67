// The kernel of reuse_gate_cuda.h. Only reuse_gate_cuda.cc includes it, after it has checked the
// shapes.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/sparse/common/select_cuda.h"

namespace kvasir::kernels {

struct ReuseGateLaunch {
  SelectLaunch select = {};
  QueryRotation rotation = {};
  int64_t heads = 1;  // KV heads that choose together
};

cudaError_t LaunchReuseGate(const ReuseGateLaunch& params, cudaStream_t stream);

}  // namespace kvasir::kernels
