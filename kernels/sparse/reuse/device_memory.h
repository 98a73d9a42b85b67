// What a sequence remembers of its selections on the GPU (selection_memory.h), as kernels see it:
// of each (layer, KV head) the list, what every stage of the selector left, and under rules that
// read queries those that the stages ran with. Kernels of a selector leave out what serves still;
// the one that writes lists recalls and remembers them (reuse_row.cuh). Plain data in device
// memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/base/host_device.h"
#include "kernels/paged/page_selection.h"

namespace kvasir::kernels {

// Stages of a selector at most.
inline constexpr size_t kMaxStages = 3;

// Whether a query finds nothing to be served with: it does not follow directly behind the one that
// was served last, or stands where a sequence may resume (reusing_select.h).
KVASIR_HOST_DEVICE constexpr bool StartsAnew(int64_t position, int64_t last_position) {
  return position != last_position + 1 || position % kPageTokens == 0;
}

// Of one (layer, KV head).
struct RememberedRow {
  // All bits set, and no position behind it is one that a list serves.
  static constexpr int64_t kNothing = -1;

  int64_t position = kNothing;   // of the query that was served last
  int64_t ran_at[kMaxStages];    // the query's position when the stage ran
  int64_t window_begin;          // when the first stage ran
  int64_t count;                 // entries
  int32_t kept[kMaxStages - 1];  // what a stage before the last left
  // The verdict of this step where the rule reads queries (reuse_gate_cuda.h).
  int32_t first_stage;
};

// The rules of reuse_rules.h.
enum class DeviceReuseRule : int32_t { kInterval, kCosine, kBoth };

// Of one query block's sequence.
struct DeviceSelectionMemory {
  RememberedRow* rows = nullptr;    // [layers x KV heads]; null: nothing is remembered
  SelectionEntry* lists = nullptr;  // [layers x KV heads, capacity]
  int64_t capacity = 0;
  int32_t* stage_items = nullptr;  // [layers x KV heads, num_stages - 1, max_items]
  int64_t max_items = 0;
  float* anchors = nullptr;  // [layers x KV heads, num_stages, query_floats]: the queries that
                             // stages ran with, not rotated
  int64_t query_floats = 0;  // group x head_dim; 0 under rules that read no queries
  DeviceReuseRule rule = DeviceReuseRule::kInterval;
  int32_t num_stages = 1;
  int64_t intervals[kMaxStages] = {};  // of the stages: steps
};

}  // namespace kvasir::kernels
