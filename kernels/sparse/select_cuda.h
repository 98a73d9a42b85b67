// What selectors and pruners on the GPU do the same way before their kernels start: the checks of a
// call, and the params as kernels take them. Called by quest_cuda.cc and its like. Thread-safe.
// Only in builds with CUDA.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "kernels/sparse/reuse/device_memory.h"
#include "kernels/sparse/stages.h"

namespace kvasir::kernels {

// Query heads of a KV head at most, where a kernel holds something of each in registers.
inline constexpr int64_t kMaxCudaGroup = 8;

// A Select or Prune call as its kernels see it. All pointers are device memory.
struct SelectLaunch {
  const void* q = nullptr;  // [tokens, KV heads x group, head_dim]
  DType q_dtype = DType::kFloat32;
  int64_t group = 0;
  PagedKv kv;
  int64_t layer = 0;
  float scale = 0;
  const QueryBlock* blocks = nullptr;
  const SelectionNumbers* numbers = nullptr;        // one per block
  const DeviceSelectionMemory* memories = nullptr;  // one per block; null: no row remembers
  PageSelection out = {};
  DeviceRopePositions rope = {};
  bool is_whole_step = false;  // every token of the step is a query tile of its own, in this call
};

// INVALID_ARGUMENT, opened by `name`, on shapes, or on what no kernel here serves: head_dim other
// than 64 and 128, q or KV other than float32 and bfloat16, rows with a memory on the CPU.
absl::StatusOr<SelectLaunch> MakeSelectLaunch(absl::string_view name, const SelectParams& params,
                                              const PageSelection& out, const std::byte* workspace);

// INVALID_ARGUMENT where keys are cached un-rotated and queries are, too: of a selector whose
// kernels rotate nothing (distant_queries_cuda.h).
absl::Status RequirePlacedQueries(absl::string_view name, const SelectParams& params);

// FAILED_PRECONDITION unless the KV keeps bounds, or key codes.
absl::Status RequireBounds(absl::string_view name, const PagedKv& kv);
absl::Status RequireKeyCodes(absl::string_view name, const PagedKv& kv);

}  // namespace kvasir::kernels
