#include "kernels/sparse/common/selection_accounting.h"

namespace kvasir::kernels {

PageCounts& PageCounts::operator+=(const PageCounts& other) {
  total += other.total;
  attended += other.attended;
  selected_out += other.selected_out;
  window += other.window;
  pruned += other.pruned;
  return *this;
}

int64_t CountPrunedPages(const SelectionHeader& header, const SelectionEntry* list) {
  if (header.kind == SelectionHeader::Kind::kAll) return 0;
  int64_t pruned = 0;
  for (int32_t i = 0; i < header.count; ++i) {
    if (IsPrunedPage(header, list[i])) ++pruned;
  }
  return pruned;
}

PageCounts CountPages(const SelectionHeader& header, const SelectionEntry* list,
                      int64_t last_position, SkipReason reason) {
  PageCounts counts = {.total = last_position / kPageTokens + 1};
  if (header.kind == SelectionHeader::Kind::kAll) {
    counts.attended = counts.total;
    return counts;
  }
  for (SelectedPages walk(header, list, last_position); walk.valid(); walk.Next()) {
    ++counts.attended;
  }
  counts.pruned = CountPrunedPages(header, list);
  (reason == SkipReason::kWindow ? counts.window : counts.selected_out) =
      counts.total - counts.attended - counts.pruned;
  return counts;
}

}  // namespace kvasir::kernels
