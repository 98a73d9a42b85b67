// Counts the pages that attention reads and skips under a selection, for RowAccounting and the skip
// metrics. Derived from SelectedPages, the one definition of what is attended. Thread-safe.
#pragma once

#include <cstdint>

#include "kernels/paged/page_selection.h"
#include "kernels/sparse/common/stages.h"

namespace kvasir::kernels {

// attended + selected_out + window + pruned == total.
struct PageCounts {
  int64_t total = 0;         // pages that dense attention would read
  int64_t attended = 0;      // pages with at least one attended token
  int64_t selected_out = 0;  // skipped, by reason
  int64_t window = 0;
  int64_t pruned = 0;

  PageCounts& operator+=(const PageCounts& other);
  friend bool operator==(const PageCounts&, const PageCounts&) = default;
};

// Number of pages of a row in which a selector chose tokens and pruning left none. Pages that sink
// or window touch do not count: they are attended to anyway.
int64_t CountPrunedPages(const SelectionHeader& header, const SelectionEntry* list);

// Counts the pages of one row (query tile, KV head) whose last query is at `last_position`.
// `reason` is that of the selector that made the selection.
PageCounts CountPages(const SelectionHeader& header, const SelectionEntry* list,
                      int64_t last_position, SkipReason reason);

}  // namespace kvasir::kernels
