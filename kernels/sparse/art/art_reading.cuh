// The order in which art reads a row, for its kernels:
//
//   order    0 .. first | ...        | skip_begin ...  | skip_end ...
//   item     0 ..       | the last ..|                 | .. first
//            page 0     | window     | may stay unread | rest of the sink
//
// Pages that may stay unread are read newest first, or in the order of the list's scores.
#pragma once

#include "kernels/attention/page_pipeline.cuh"
#include "kernels/sparse/art/art_launch.h"
#include "kernels/sparse/common/selection_header.h"

namespace kvasir::kernels {

struct Reading {
  PageRun run;
  // The items that may stay unread, in the order of art_order.cu; null: newest first.
  const Ranked* ranked = nullptr;
  int first = 0;  // items of page 0, which are read before all others
  int half = -1;  // the item of the window's first page in order, where the list has tokens of it
  int skip_begin = 0;
  int skip_end = 0;

  __device__ int size() const { return static_cast<int>(run.items.num_items); }
  __device__ int64_t ItemAt(int order) const {
    if (ranked != nullptr && MaySkip(order)) return ranked[order - skip_begin].item();
    return order < first ? order : size() - 1 - (order - first);
  }
  // The order of an item where the newest is first. REQUIRES: item >= first.
  __device__ int OrderOf(int64_t item) const { return static_cast<int>(size() - 1 - item) + first; }
  __device__ bool MaySkip(int order) const { return order >= skip_begin && order < skip_end; }
};

__device__ inline RowItem ItemOf(const ArtLaunch& p, const Reading& reading, int64_t index) {
  const int64_t row = reading.run.row;
  return FindItem(reading.run.items, p.headers[row], p.entries + row * p.capacity, index);
}

// Finds the items that belong to page 0 and to the window's first page.
__device__ inline void FindHalves(const ArtLaunch& p, Reading& reading) {
  const RowItems& items = reading.run.items;
  const auto has_tokens_of = [&](int64_t page, int64_t index) {
    if (index >= items.num_items) return false;
    const RowItem item = ItemOf(p, reading, index);
    return item.page == page && item.mask != 0;
  };
  while (reading.first < 2 && has_tokens_of(0, reading.first)) ++reading.first;
  const int64_t window = items.num_sink + items.num_list;
  if (items.num_list == 0 || window < reading.first) return;
  const SelectionEntry* list = p.entries + reading.run.row * p.capacity;
  int64_t last = items.num_list - 1;
  while (last > 0 && list[last].page > items.first_window_page) --last;
  if (items.num_sink + last < reading.first) return;
  if (has_tokens_of(items.first_window_page, items.num_sink + last)) {
    reading.half = reading.OrderOf(window);
  }
}

// Plans to read the newest page first. A listed page that also holds sink or window tokens must be
// read.
__device__ inline Reading PlanReading(const ArtLaunch& p, int64_t row) {
  Reading reading = {.run = WholeRow(p, row)};
  FindHalves(p, reading);
  const RowItems& items = reading.run.items;
  const SelectionHeader& header = p.headers[row];
  int64_t low = 0, high = 0;  // items that may stay unread
  if (header.kind == SelectionHeader::Kind::kAll) {
    const SelectionHeader made =
        MakeHeader(reading.run.tile, p.numbers[row / p.kv.layout.num_kv_heads]);
    if (made.kind == SelectionHeader::Kind::kAll) return reading;
    low = CeilPages(made.sink_end);
    high = made.window_begin / kPageTokens;
  } else {
    const SelectionEntry* list = p.entries + row * p.capacity - items.num_sink;  // by item
    low = items.num_sink;
    high = items.num_sink + items.num_list;
    while (low < high && list[low].page < items.num_sink) ++low;
    while (high > low && list[high - 1].page >= items.first_window_page) --high;
  }
  low = max(int64_t{reading.first}, low);
  if (high <= low) return reading;
  reading.skip_begin = reading.OrderOf(high - 1);
  reading.skip_end = reading.OrderOf(low) + 1;
  // A row may end where its window does, also when the first listed pages have no tokens.
  const int end_of_window = reading.OrderOf(items.num_sink + items.num_list) + 1;
  while (reading.skip_begin > end_of_window &&
         ItemOf(p, reading, reading.ItemAt(reading.skip_begin - 1)).mask == 0) {
    --reading.skip_begin;
  }
  return reading;
}

}  // namespace kvasir::kernels
