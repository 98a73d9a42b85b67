// What selection rows attend to, counted on the GPU, where their lists lie: for accounting, so that
// no list leaves the device. The same numbers as a walk over SelectedPages. All pointers, spans
// included, are device memory. Called after select, for blocks of several queries: attention of
// one query counts itself (AttendParams::device_counts). Thread-safe. Only in builds with CUDA.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>
#include <span>

#include "absl/status/status.h"

#include "kernels/paged/page_selection.h"

namespace kvasir::kernels {

// `counts`: [selection.num_rows], written; rows are blocks x num_kv_heads. Nothing is allocated or
// waited for. INVALID_ARGUMENT on shapes; INTERNAL with CUDA's error when the launch fails. Cost:
// reads the lists once.
absl::Status CountSelected(std::span<const QueryBlock> blocks, const PageSelection& selection,
                           std::span<SelectedCounts> counts, cudaStream_t stream);

}  // namespace kvasir::kernels
