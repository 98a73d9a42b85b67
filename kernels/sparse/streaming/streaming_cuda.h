// The selector `streaming` (streaming_selector.h) on the GPU: the rows' headers, in device memory.
// All pointers of the params, spans included, are device memory. Called by the attention layer.
// Thread-safe. Only in builds with CUDA.
#pragma once

#include <cuda_runtime_api.h>

#include "absl/status/status.h"

#include "kernels/sparse/stages.h"

namespace kvasir::kernels {

// Looks at no query and no key: keys may be cached in any form. Nothing is allocated or waited for;
// may be captured. INVALID_ARGUMENT on shapes.
absl::Status SelectStreaming(const SelectParams& params, const PageSelection& out,
                             cudaStream_t stream);

}  // namespace kvasir::kernels
