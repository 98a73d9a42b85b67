// Counts on the GPU what selection rows attend to, for accounting, so that no list leaves the
// device. Gives the same numbers as a walk over SelectedPages. All pointers, spans included, are
// device memory. Called after select, for tiles of several queries: attention of one query does its
// own counting (CudaAttendParams::device_counts). Thread-safe. Only in builds with CUDA.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>
#include <span>

#include "absl/status/status.h"

#include "kernels/paged/page_selection.h"

namespace kvasir::kernels {

// Writes `counts`: [selection.num_rows]. Rows are tiles x num_kv_heads. Allocates nothing and waits
// for nothing. INVALID_ARGUMENT on shapes; INTERNAL with CUDA's error when the launch fails. Cost:
// reads the lists once.
absl::Status CountSelected(std::span<const QueryTile> tiles, const PageSelection& selection,
                           std::span<SelectedCounts> counts, cudaStream_t stream);

}  // namespace kvasir::kernels
