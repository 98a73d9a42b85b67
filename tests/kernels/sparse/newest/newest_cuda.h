// The selector `newest` (newest_selector.h) on the GPU: the same lists. added_method_cuda_test.cc
// adds it to the list of methods that have kernels. Only in builds with CUDA.
#pragma once

#include <cuda_runtime_api.h>
#include <memory>

#include "absl/status/statusor.h"

#include "kernels/sparse/common/cuda_selector.h"
#include "kernels/sparse/common/method_options.h"
#include "kernels/sparse/common/select_cuda.h"

namespace kvasir::kernels {

absl::StatusOr<std::unique_ptr<CudaSelector>> MakeCudaNewest(const MethodOptions& options);

// The kernel; only newest_cuda.cc calls it.
cudaError_t LaunchNewest(const SelectLaunch& params, cudaStream_t stream);

}  // namespace kvasir::kernels
