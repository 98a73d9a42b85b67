// The selector `all` (all_selector.h) on the GPU: it has no kernels, because its rows are written
// with the step's table. Thread-safe. Only in builds with CUDA.
#pragma once

#include <memory>

#include "absl/status/statusor.h"

#include "kernels/sparse/common/cuda_selector.h"
#include "kernels/sparse/common/method_options.h"

namespace kvasir::kernels {

// INVALID_ARGUMENT for any option.
absl::StatusOr<std::unique_ptr<CudaSelector>> MakeCudaAll(const MethodOptions& options);

}  // namespace kvasir::kernels
