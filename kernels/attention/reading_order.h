// The order in which attention reads the pages of a row, and the segments in which it sums them:
// page 0 first, then the others from the newest to the oldest.
//
//   pages    0 | 1 ........ 31 | 32 ....... 63 | 64 ... newest
//   segment  0 |       1       |       2       |       3
//   read    1st       4th             3rd             2nd
//
// Newest first, so that a row that ends early (terminator.h) stops in the middle of the path that
// every row takes. Page 0 comes before them, because the first tokens draw much of the attention,
// and later pages can be weighed against it. Segments are cut by absolute page numbers. Used by the
// CPU implementations of Attend. Thread-safe.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/paged/page_selection.h"

namespace kvasir::kernels {

// Pages per segment: 2,048 tokens, the unit that can be computed independently (split-KV).
inline constexpr int64_t kSegmentPages = 32;

constexpr int64_t SegmentOf(int64_t page) { return page == 0 ? 0 : page / kSegmentPages + 1; }

constexpr int64_t FirstPageOf(int64_t segment) {
  return segment <= 1 ? segment : (segment - 1) * kSegmentPages;
}

// A page of a row.
struct PageStep {
  int64_t page = 0;
  uint64_t mask = 0;  // tokens that the tile's last query attends to
  int64_t segment = 0;
  const SelectionEntry* entry = nullptr;  // in the row's list, or null
};

// Fills `steps` with the pages from the position of `walk` up to `end_page`, in reading order.
// Returns their number. REQUIRES: room for them.
inline int64_t ListSteps(SelectedPages walk, int64_t end_page, PageStep* steps) {
  int64_t count = 0;
  for (; walk.valid() && walk.page() < end_page; walk.Next()) {
    steps[count++] = {.page = walk.page(),
                      .mask = walk.mask(),
                      .segment = SegmentOf(walk.page()),
                      .entry = walk.entry()};
  }
  const bool has_first = count > 0 && steps[0].page == 0;
  std::reverse(steps + (has_first ? 1 : 0), steps + count);
  return count;
}

}  // namespace kvasir::kernels
