// Pages that the last query tile of an observed row selected, by layer and by column: a run of
// pages of equal length, at most kMostColumns of them, so that a map has the same size however long
// the context. Filled by the attention meter, told to the coordinator (SelectionMap in
// worker.proto). Thread-compatible.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvasir::worker {

struct ObservedPages {
  static constexpr int64_t kMostColumns = 128;

  int64_t num_pages = 0;  // of the context; 0: nothing was observed
  int64_t pages_per_column = 1;
  int64_t num_columns = 0;
  int64_t num_heads = 0;              // KV heads that counts are sums over
  std::vector<uint32_t> counts = {};  // [layers, num_columns]

  // REQUIRES: at least one page.
  static ObservedPages Of(int64_t num_pages, int64_t num_layers, int64_t num_heads) {
    ObservedPages pages = {.num_pages = num_pages, .num_heads = num_heads};
    pages.pages_per_column = (num_pages + kMostColumns - 1) / kMostColumns;
    pages.num_columns = (num_pages + pages.pages_per_column - 1) / pages.pages_per_column;
    pages.counts.resize(static_cast<size_t>(num_layers * pages.num_columns));
    return pages;
  }
  void Add(int64_t layer, int64_t page) {
    ++counts[static_cast<size_t>(layer * num_columns + page / pages_per_column)];
  }
};

}  // namespace kvasir::worker
