// Counts in kernels what a selection row attends to (SelectedCounts). The threads that count a row
// take its items in turn.
#pragma once

#include "kernels/base/warp.cuh"
#include "kernels/paged/row_items.h"

namespace kvasir::kernels {

// Counts pages and tokens of the items that are thread `thread`'s share among `threads`.
__device__ inline SelectedCounts CountShare(const SelectionHeader& header,
                                            const SelectionEntry* list, const QueryTile& tile,
                                            int thread, int threads) {
  const RowItems items = NumberItems(header, tile.first_position + tile.num_rows - 1);
  SelectedCounts counts;
  if (header.kind == SelectionHeader::Kind::kAll) {
    if (thread != 0) return counts;
    return {.pages = static_cast<int32_t>(items.num_items),
            .tokens = static_cast<int32_t>(items.last_position + 1)};
  }
  for (int64_t i = thread; i < items.num_items; i += threads) {
    const RowItem item = FindItem(items, header, list, i);
    if (item.mask == 0) continue;
    counts.tokens += __popcll(item.mask);
    counts.pages += IsAnotherPage(items, header, list, i) ? 1 : 0;
  }
  for (int32_t i = thread; i < header.count; i += threads) {
    counts.pruned_pages += IsPrunedPage(header, list[i]) ? 1 : 0;
  }
  return counts;
}

// Adds the counts of a warp's lanes and returns the sum to all of them.
__device__ inline SelectedCounts SumOfCounts(SelectedCounts counts) {
  for (int distance = kWarpThreads / 2; distance > 0; distance /= 2) {
    counts.pages += __shfl_xor_sync(kAllLanes, counts.pages, distance);
    counts.tokens += __shfl_xor_sync(kAllLanes, counts.tokens, distance);
    counts.pruned_pages += __shfl_xor_sync(kAllLanes, counts.pruned_pages, distance);
  }
  return counts;
}

// Counts a row, by one warp: all counts except unread_pages, which it leaves unchanged.
__device__ inline void CountRow(const SelectionHeader& header, const SelectionEntry* list,
                                const QueryTile& tile, SelectedCounts& to) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const SelectedCounts counts = SumOfCounts(CountShare(header, list, tile, lane, kWarpThreads));
  if (lane != 0) return;
  to.pages = counts.pages;
  to.tokens = counts.tokens;
  to.pruned_pages = counts.pruned_pages;
  to.is_list = header.kind == SelectionHeader::Kind::kList ? 1 : 0;
  to.reused_stages = header.reused_stages;
}

}  // namespace kvasir::kernels
