#include "kernels/sparse/selection_accounting.h"

namespace kvasir::kernels {

PageCounts& PageCounts::operator+=(const PageCounts& other) {
  total += other.total;
  attended += other.attended;
  selected_out += other.selected_out;
  window += other.window;
  return *this;
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
  (reason == SkipReason::kWindow ? counts.window : counts.selected_out) =
      counts.total - counts.attended;
  return counts;
}

}  // namespace kvasir::kernels
