// What a sequence remembers of its selections on the GPU (selection_memory.h), as kernels see it:
// the list of each (layer, KV head), under the rule `interval` and selectors of one stage. Kernels
// of a selector leave out rows that a list serves; the one that writes lists recalls and remembers
// them (reuse_row.cuh). Plain data in device memory.
#pragma once

#include <cstdint>

#include "kernels/base/host_device.h"
#include "kernels/paged/page_selection.h"

namespace kvasir::kernels {

// Whether a query finds nothing to be served with: it does not follow directly behind the one that
// was served last, or stands where a sequence may resume (reusing_select.h).
KVASIR_HOST_DEVICE constexpr bool StartsAnew(int64_t position, int64_t last_position) {
  return position != last_position + 1 || position % kPageTokens == 0;
}

struct RememberedList {
  // All bits set, and no position behind it is one that a list serves.
  static constexpr int64_t kNothing = -1;

  int64_t position = kNothing;  // of the query that was served last
  int64_t ran_at = kNothing;    // of the query that the list was made for
  int64_t count = 0;            // entries
};

// Of one query block's sequence.
struct DeviceSelectionMemory {
  RememberedList* rows = nullptr;   // [layers x KV heads]; null: nothing is remembered
  SelectionEntry* lists = nullptr;  // [layers x KV heads][capacity]
  int64_t capacity = 0;
  int64_t interval = 0;  // steps between two lists
};

}  // namespace kvasir::kernels
