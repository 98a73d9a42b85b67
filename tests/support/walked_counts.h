// What a selection row attends to, counted by a walk over it: the reference of the GPU's counts.
#pragma once

#include <bit>
#include <vector>

#include "kernels/paged/page_selection.h"
#include "kernels/sparse/common/selection_accounting.h"
#include "tests/support/attention_batch.h"

namespace kvasir::tests {

inline bool AreSame(const kernels::SelectedCounts& a, const kernels::SelectedCounts& b) {
  return a.pages == b.pages && a.tokens == b.tokens && a.pruned_pages == b.pruned_pages &&
         a.unread_pages == b.unread_pages && a.is_list == b.is_list &&
         a.reused_stages == b.reused_stages;
}

// All but unread_pages.
inline kernels::SelectedCounts WalkedCounts(const kernels::SelectionHeader& header,
                                            const kernels::SelectionEntry* list,
                                            int64_t last_position) {
  kernels::SelectedCounts counts;
  counts.pruned_pages = static_cast<int32_t>(kernels::CountPrunedPages(header, list));
  counts.is_list = header.kind == kernels::SelectionHeader::Kind::kList ? 1 : 0;
  counts.reused_stages = header.reused_stages;
  for (kernels::SelectedPages walk(header, list, last_position); walk.valid(); walk.Next()) {
    ++counts.pages;
    counts.tokens += std::popcount(walk.mask());
  }
  return counts;
}

// Of all rows of a batch.
inline std::vector<kernels::SelectedCounts> WalkedCounts(kernels::AttentionBatch& batch) {
  std::vector<kernels::SelectedCounts> counts;
  batch.Run([&](const kernels::AttendParams& params, kernels::Executor&) {
    for (int64_t row = 0; row < params.selection.num_rows; ++row) {
      const kernels::QueryTile& tile =
          params.tiles[static_cast<size_t>(row / params.kv.layout.num_kv_heads)];
      counts.push_back(WalkedCounts(params.selection.header(row), params.selection.list(row),
                                    tile.first_position + tile.num_rows - 1));
    }
  });
  return counts;
}

}  // namespace kvasir::tests
