// Attention on the GPU: the op of attend.h for bfloat16 q and KV, head_dim 64 or 128, at most 8
// query heads a KV head. All pointers of the params, spans included, are device memory;
// params.scratch is not used. What attend.h guarantees holds but for this: a result depends on the
// length of its own list (it decides how the list is cut for parallel work), never on batch, tier
// or other rows; the products' sums are those of the tensor cores, in float32.
#pragma once

#include <cuda_runtime_api.h>

#include "absl/status/status.h"

#include "kernels/attention/attend.h"
#include "kernels/paged/kv_tensor_maps.h"

namespace kvasir::kernels {

// Device memory for the partial results of `blocks` query blocks; `group` is the number of query
// heads of a KV head.
int64_t AttendDecodeWorkspaceBytes(const KvLayout& layout, int64_t blocks, int64_t group);

// Attention of blocks of one query each. `arrivals`: at least one for each row of the selection, 0
// before the first call, which calls leave so; of calls that may run side by side each has its own.
// Nothing is allocated or waited for; may be captured.
// INVALID_ARGUMENT on shapes, UNIMPLEMENTED with terminations; a selected page that is absent sets
// the slot's fault, and its out rows are unspecified. At grouped positions the query stands where
// it sees far keys from, and near keys are moved as far as it is. Cost: reads each attended token
// once for all query heads of the group (of pages of which more than half is attended to each
// attended piece of 8), in products of 64 tokens of however many pages; writes and reads again 4 *
// (head_dim + 2) bytes for each of at most 128 partial results a query head.
absl::Status AttendDecode(const AttendParams& params, const KvTensorMaps& maps,
                          std::byte* workspace, std::span<uint32_t> arrivals, cudaStream_t stream);

// Attention of blocks of up to 64 queries, one pass over the pages of each selection row. The rest
// as AttendDecode.
// Cost: reads each attended piece of 8 tokens once for every two query heads of the group; at
// grouped positions twice where it is far for some queries of the block and near for others.
absl::Status AttendPrefill(const AttendParams& params, const KvTensorMaps& maps,
                           cudaStream_t stream);

}  // namespace kvasir::kernels
