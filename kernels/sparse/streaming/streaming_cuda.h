// The selector `streaming` (streaming_selector.h) on the GPU: writes the rows' headers to device
// memory. All pointers of the params, including spans, are device memory. Called through
// cuda_selector.h. Thread-safe. Only in builds with CUDA.
#pragma once

#include <cuda_runtime_api.h>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/sparse/common/cuda_selector.h"
#include "kernels/sparse/common/method_options.h"
#include "kernels/sparse/common/stages.h"

namespace kvasir::kernels {

// Reads no query and no key, so keys may be cached in any form. Allocates nothing and waits for
// nothing; may be captured. INVALID_ARGUMENT on shapes.
absl::Status SelectStreaming(const CudaSelectParams& params, const PageSelection& out,
                             cudaStream_t stream);

// INVALID_ARGUMENT for any option.
absl::StatusOr<std::unique_ptr<CudaSelector>> MakeCudaStreaming(const MethodOptions& options);

}  // namespace kvasir::kernels
