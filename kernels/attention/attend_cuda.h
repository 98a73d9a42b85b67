// Attention on the GPU: the op of attend.h for bfloat16 q, KV of bfloat16, fp8_e4m3 or int8, and a
// head_dim of 64 or 128. All pointers of the params, spans included, are device memory. The
// guarantees of attend.h hold with two exceptions: a result depends on the length of its own list
// (which decides how the list is cut for parallel work), never on batch, tier or other rows; and
// products are summed by the tensor cores, in float32. Rows that may end early are AttendArt's
// (kernels/sparse/art/art_cuda.h).
#pragma once

#include <cuda_runtime_api.h>
#include <span>

#include "absl/status/status.h"

#include "kernels/attention/attend.h"
#include "kernels/attention/prepared_pages.h"
#include "kernels/base/device_buffer.h"
#include "kernels/paged/kv_tensor_maps.h"

namespace kvasir::kernels {

// An Attend call on the GPU.
struct CudaAttendParams : AttendCall {
  // Off when q and the cached keys are rotated. Otherwise neither is, and this has the positions of
  // all rows.
  DeviceRopePositions device_rope = {};
  // For tiles of one query: [rows of selection], written: what the rows attend to. Empty: not
  // counted.
  std::span<SelectedCounts> device_counts = {};
};

// Returns the device memory for the partial results of `blocks` query tiles. `group` is the number
// of query heads of a KV head.
int64_t AttendDecodeWorkspaceBytes(const KvLayout& layout, int64_t blocks, int64_t group);

// Attention of tiles of one query each. `arrivals` has at least one number for each row of the
// selection, 0 before the first call; calls leave them 0. Calls that may run side by side need
// separate ones. Allocates nothing and waits for nothing; may be captured. INVALID_ARGUMENT on
// shapes. A selected page that is absent sets the slot's fault, and its out rows are unspecified.
// With window_tokens, the tiles' selections have that window: one query's is exact.
// With grouped positions the query is read at its far position, and near keys are shifted by the
// same distance.
// Cost: reads each attended token once for every 8 query heads of the group (of a page with more
// than half of its tokens attended to, each attended piece of 8), in products of 64 tokens from any
// number of pages. Writes and reads back 4 * (head_dim + 2) bytes for each of at most 128 partial
// results a query head.
absl::Status AttendDecode(const CudaAttendParams& params, const KvTensorMaps& maps,
                          std::byte* workspace, std::span<uint32_t> arrivals, cudaStream_t stream);

// Attention of tiles of up to 64 queries, in one pass over the pages of each selection row.
// Otherwise as AttendDecode.
// Cost: reads each attended piece of 8 tokens once for every two query heads of the group. With
// grouped positions it is read twice where it is far for some queries of the tile and near for
// others.
absl::Status AttendPrefill(const CudaAttendParams& params, const KvTensorMaps& maps,
                           cudaStream_t stream);

// Memory for prepared pages.
struct PreparedMemory {
  DeviceBuffer buffer;
  std::byte* pages = nullptr;  // in the buffer, aligned as tensor maps want it
  int64_t bytes = 0;
  KvTensorMaps maps;

  // Takes PreparedBytes. RESOURCE_EXHAUSTED when there is no room.
  static absl::StatusOr<PreparedMemory> Create(const KvLayout& layout, int64_t max_tokens);
};

// AttendPrefill over prepared pages: the same bits. `pages` is PlanPreparedPages' for the call's
// tiles and the memory, whose earlier contents are overwritten. INVALID_ARGUMENT also for grouped
// positions. REQUIRES: all rows are of kind all.
// Cost: reads every token of the sequences once, from its tier, and writes it; then reads the copy
// as AttendPrefill reads KV of bfloat16 with rotated keys. One pair of launches for each pass of
// heads.
absl::Status AttendPrepared(const CudaAttendParams& params, PreparedPages pages,
                            const PreparedMemory& memory, cudaStream_t stream);

}  // namespace kvasir::kernels
