// The residency protocol on the GPU: the ops of residency.h for state in device memory, put on a
// stream. They leave the same state, entry by entry; CopyRowsToHost and CopyFills change no state.
// They allocate nothing and wait for nothing. Rows are device memory, except for CopyRowsToHost.
// Errors are the device's.
// Cost: OpenRows, MapFills and the part of PlanFills after its scan are one CTA each. The scan
// reads 8 bytes a page. CopyFills is 32 CTAs of four warps, small enough to run beside attention.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cuda_runtime_api.h>
#include <span>

#include "absl/status/status.h"

#include "kernels/residency/residency.h"

namespace kvasir::kernels {

absl::Status InitResidency(const ResidencyState& state, cudaStream_t stream);
absl::Status OpenRows(const ResidencyState& state, std::span<const int32_t> rows,
                      cudaStream_t stream);
// `rows` is host memory and is read before the call returns. A few rows at a time, a short kernel
// gathers the pages into `gathered` (device memory of at least one row), and the copy engine, which
// needs no multiprocessor, copies them to their extents. REQUIRES: nothing else uses `gathered`.
absl::Status CopyRowsToHost(const ResidencyState& state, std::span<const int32_t> rows,
                            std::span<std::byte> gathered, cudaStream_t stream);
absl::Status SealRows(const ResidencyState& state, std::span<const int32_t> rows,
                      cudaStream_t stream);
absl::Status RestoreRows(const ResidencyState& state, std::span<const int32_t> rows,
                         cudaStream_t stream);
absl::Status FreeRows(const ResidencyState& state, std::span<const int32_t> rows,
                      cudaStream_t stream);
absl::Status MapFills(const ResidencyState& state, cudaStream_t stream);
absl::Status PlanFills(const ResidencyState& state, uint32_t step, cudaStream_t stream);
absl::Status CopyFills(const ResidencyState& state, cudaStream_t stream);
absl::Status CountDevicePages(const ResidencyState& state, std::span<int32_t> counts,
                              cudaStream_t stream);

// A changed entry of a table of block rows (PagedKv).
struct BlockRowChange {
  int64_t entry = 0;
  int32_t row = 0;
};
// Begins step `step`: kernels read its number at `step_number`, and the changed table. REQUIRES: no
// entry is named twice.
absl::Status BeginResidencyStep(uint32_t step, uint32_t* step_number,
                                std::span<const BlockRowChange> changes, int32_t* block_rows,
                                cudaStream_t stream);

}  // namespace kvasir::kernels
