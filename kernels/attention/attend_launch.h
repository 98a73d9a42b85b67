// Kernels of attend_cuda.h: parameters in the device's form, and the launches. Besides the kernels,
// only attend_cuda.cc and kernels/sparse/art include this header.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include "absl/status/statusor.h"

#include "kernels/attention/attend_cuda.h"
#include "kernels/attention/attend_kernel.h"
#include "kernels/attention/prepared_pages.h"
#include "kernels/paged/kv_tensor_maps.h"
#include "kernels/paged/page_selection.h"

namespace kvasir::kernels {

// All pointers are device memory.
struct AttendLaunch {
  const __nv_bfloat16* q = nullptr;  // [tokens, KV heads x group, head_dim]
  __nv_bfloat16* out = nullptr;      // like q
  float* lse = nullptr;              // [tokens, KV heads x group]; null: not written
  PagedKv kv;
  int64_t token_bytes = 0;  // KvLayout::token_bytes
  int64_t layer = 0;
  float scale = 0;
  const QueryTile* tiles = nullptr;
  const SelectionHeader* headers = nullptr;
  const SelectionEntry* entries = nullptr;
  int64_t capacity = 0;  // entries of a row
  int64_t num_rows = 0;  // tiles x KV heads
  int64_t group = 0;     // query heads of a KV head
  uint8_t* faults = nullptr;
  SelectedCounts* counts = nullptr;  // [num_rows]; null: not counted
  DeviceRopePositions rope = {};     // on: q and keys are rotated to their compact positions,
  GroupedPositions grouped = {};     // or, when this is on, to their grouped ones
  int64_t window_tokens = 0;         // of AttendCall
};

// INVALID_ARGUMENT as in attend_cuda.h.
absl::StatusOr<AttendLaunch> MakeAttendLaunch(const CudaAttendParams& params);

// A partial state of decode: the maximum, the sum, nothing up to this offset, then the values.
inline constexpr int kPartialHead = 4;

struct DecodeScratch {
  float* partials = nullptr;     // [rows, MaxDecodeUnits, group, kPartialHead + head_dim]
  uint32_t* arrivals = nullptr;  // [rows]: number of ended units; 0 before and after a call
};

AttendShape ShapeOf(const AttendLaunch& params);

// For tiles of one query. `plan` is PlanAttendDecode's.
cudaError_t LaunchAttendDecode(const AttendLaunch& params, const AttendKernelPlan& plan,
                               const KvTensorMaps& maps, const DecodeScratch& memory,
                               cudaStream_t stream);
// For tiles of up to 64 queries. `plan` is PlanAttendPrefill's.
cudaError_t LaunchAttendPrefill(const AttendLaunch& params, const AttendKernelPlan& plan,
                                const KvTensorMaps& maps, cudaStream_t stream);

// Writes prepared pages to `memory`. Records reads and faults.
cudaError_t LaunchPreparePages(const AttendLaunch& params, const PreparedPages& pages,
                               std::byte* memory, cudaStream_t stream);
// Attends for the heads of `pages`. `plan` is PlanAttendPrepared's, `maps` are those of the memory.
cudaError_t LaunchAttendPrepared(const AttendLaunch& params, const AttendKernelPlan& plan,
                                 const PreparedPages& pages, const KvTensorMaps& maps,
                                 cudaStream_t stream);

}  // namespace kvasir::kernels
