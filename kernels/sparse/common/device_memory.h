// The GPU's memory of a sequence's selections (selection_memory.h) as kernels see it. For each
// (layer, KV head) it holds the list, the output of every stage of the selector and, under rules
// that read queries, the queries that the stages ran with. reuse_row.cuh says how kernels use it.
// Plain data in device memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/base/host_device.h"
#include "kernels/paged/page_selection.h"

namespace kvasir::kernels {

// Most stages of a selector.
inline constexpr size_t kMaxStages = 3;

// Whether nothing remembered serves a query: it does not directly follow the query served last, or
// it is at a position where a sequence may resume (reusing_select.h).
KVASIR_HOST_DEVICE constexpr bool StartsAnew(int64_t position, int64_t last_position) {
  return position != last_position + 1 || position % kPageTokens == 0;
}

// The memory of one (layer, KV head).
struct RememberedRow {
  // All bits set. The position after it, 0, is never served by a list.
  static constexpr int64_t kNothing = -1;

  int64_t position = kNothing;   // of the query that was served last
  int64_t ran_at[kMaxStages];    // the query's position when the stage ran
  int64_t window_begin;          // of the step in which the first stage ran
  int64_t count;                 // entries in the list
  int32_t kept[kMaxStages - 1];  // items that each stage before the last left
  // The verdict of this step under rules that read queries (reuse_gate_cuda.h).
  int32_t first_stage;
};

// The rules of reuse_rules.h.
enum class DeviceReuseRule : int32_t { kInterval, kCosine, kBoth };

// The memory of one query tile's sequence.
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
  int64_t intervals[kMaxStages] = {};  // of the stages, in steps
};

}  // namespace kvasir::kernels
