// The residency protocol on the GPU: the ops of residency.h for state in device memory, put on a
// stream. They leave the same state, entry by entry; CopyExtentsToHost and CopyFills change no
// state. They allocate nothing and wait for nothing. Extents are device memory, except for
// CopyExtentsToHost. Errors are the device's. Cost: OpenExtents, MapFills, PlanPromotion and the
// part of PlanFills after its scan are one CTA each. The scan reads 8 bytes a page. CopyFills is 32
// CTAs of four warps, small enough to run beside attention.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cuda_runtime_api.h>
#include <span>

#include "absl/status/status.h"

#include "kernels/residency/residency.h"

namespace kvasir::kernels {

absl::Status InitResidency(const ResidencyState& state, cudaStream_t stream);
absl::Status OpenExtents(const ResidencyState& state, std::span<const int32_t> extents,
                         cudaStream_t stream);
// `extents` is host memory and is read before the call returns. A few extents at a time, a short
// kernel gathers the pages into `gathered` (device memory of at least one extent), and the copy
// engine, which needs no multiprocessor, copies them on to the host tier. REQUIRES: nothing else
// uses `gathered`.
absl::Status CopyExtentsToHost(const ResidencyState& state, std::span<const int32_t> extents,
                               std::span<std::byte> gathered, cudaStream_t stream);
absl::Status SealExtents(const ResidencyState& state, std::span<const int32_t> extents,
                         cudaStream_t stream);
absl::Status RestoreExtents(const ResidencyState& state, std::span<const int32_t> extents,
                            cudaStream_t stream);
absl::Status FreeExtents(const ResidencyState& state, std::span<const int32_t> extents,
                         cudaStream_t stream);
absl::Status MapFills(const ResidencyState& state, cudaStream_t stream);
absl::Status PlanFills(const ResidencyState& state, uint32_t step, cudaStream_t stream);
absl::Status PlanPromotion(const ResidencyState& state, std::span<const int32_t> extents,
                           std::span<const uint8_t> running, uint32_t step, cudaStream_t stream);
absl::Status CopyFills(const ResidencyState& state, cudaStream_t stream);
absl::Status SurveyExtents(const ResidencyState& state, std::span<ExtentUse> uses,
                           cudaStream_t stream);

// A changed entry of a table of block extents (PagedKv).
struct BlockExtentChange {
  int64_t entry = 0;
  int32_t extent = 0;
};
// Begins step `step`: kernels read its number at `step_number`, and the changed table. REQUIRES: no
// entry is named twice.
absl::Status BeginResidencyStep(uint32_t step, uint32_t* step_number,
                                std::span<const BlockExtentChange> changes, int32_t* block_extents,
                                cudaStream_t stream);

}  // namespace kvasir::kernels
