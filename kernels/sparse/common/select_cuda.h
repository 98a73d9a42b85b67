// The parts that selectors and pruners on the GPU share before their kernels start: the checks of a
// call and the params that kernels take. Called by quest_cuda.cc and its siblings. Thread-safe.
// Only in builds with CUDA.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "kernels/sparse/common/cuda_selector.h"
#include "kernels/sparse/common/device_memory.h"
#include "kernels/sparse/common/select_shape.h"
#include "kernels/sparse/common/stages.h"

namespace kvasir::kernels {

// A Select or Prune call as kernels take it. All pointers are device memory.
struct SelectLaunch {
  const void* q = nullptr;  // [tokens, KV heads x group, head_dim]
  DType q_dtype = DType::kFloat32;
  int64_t group = 0;
  PagedKv kv;
  int64_t layer = 0;
  float scale = 0;
  const QueryTile* tiles = nullptr;
  const PolicyNumbers* numbers = nullptr;           // one per query tile
  const DeviceSelectionMemory* memories = nullptr;  // one per query tile; null: no row remembers
  PageSelection out = {};
  DeviceRopePositions rope = {};
  bool is_whole_step = false;  // each token of the step is a query tile of this call
};

inline SelectShape ShapeOf(const SelectLaunch& launch) {
  return {.head_dim = launch.kv.layout.head_dim,
          .group = launch.group,
          .q = launch.q_dtype,
          .kv = launch.kv.layout.element_dtype(),
          .max_pages = launch.kv.max_blocks_per_slot,
          .rows = launch.out.num_rows};
}

// INVALID_ARGUMENT, opened by `name`, on shapes and on calls that no kernel here serves: head_dim
// other than 64 and 128, q other than float32 and bfloat16, KV that is not IsKvDType.
absl::StatusOr<SelectLaunch> MakeSelectLaunch(absl::string_view name,
                                              const CudaSelectParams& params,
                                              const PageSelection& out, const std::byte* workspace);

// INVALID_ARGUMENT where both keys and queries are un-rotated. For selectors whose kernels rotate
// nothing (distant_queries_cuda.h).
absl::Status RequirePlacedQueries(absl::string_view name, const CudaSelectParams& params);

// FAILED_PRECONDITION unless the KV keeps bounds, or key codes respectively.
absl::Status RequireBounds(absl::string_view name, const PagedKv& kv);
absl::Status RequireKeyCodes(absl::string_view name, const PagedKv& kv);

}  // namespace kvasir::kernels
