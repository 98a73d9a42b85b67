// How the pages of one decode row are numbered and cut into units of parallel work: pure arithmetic
// on the selection's header, shared by the kernels and their tests.
//
//   item   0 ..            num_sink ..            num_sink + count ..            num_items
//          pages of sink   list entries           pages of the window
//
// Items are found by number, so that any part of a row can start anywhere. A page may be two items
// (sink and list, list and window), with disjoint masks.
#pragma once

#include <cstdint>

#include "kernels/base/host_device.h"
#include "kernels/paged/page_selection.h"

namespace kvasir::kernels {

// Partial results of a row: units times warpgroups.
inline constexpr int64_t kMaxDecodeUnits = 64;

struct DecodePlan {
  int64_t num_sink = 0;
  int64_t num_list = 0;
  int64_t first_window_page = 0;
  int64_t num_items = 0;
  int64_t items_per_unit = 1;

  KVASIR_HOST_DEVICE int64_t num_units() const {
    return (num_items + items_per_unit - 1) / items_per_unit;
  }
};

// For a query at `position`. The cut depends on nothing but the number of items: few units while
// the row is short, so that one wave of a GPU holds the rows of one sequence.
KVASIR_HOST_DEVICE inline DecodePlan PlanDecodeRow(const SelectionHeader& header,
                                                   int64_t position) {
  constexpr int64_t kShortItems = 512;
  constexpr int64_t kShortUnits = 16;
  DecodePlan plan;
  const int64_t last_page = position / kPageTokens;
  if (header.kind == SelectionHeader::Kind::kAll) {
    plan.num_items = last_page + 1;
  } else {
    plan.num_sink = (header.sink_end + kPageTokens - 1) / kPageTokens;
    plan.num_list = header.count;
    plan.first_window_page = header.window_begin / kPageTokens;
    plan.num_items = plan.num_sink + plan.num_list + last_page + 1 - plan.first_window_page;
  }
  const int64_t units = plan.num_items < kShortItems ? kShortUnits : kMaxDecodeUnits;
  plan.items_per_unit = (plan.num_items + units - 1) / units;
  if (plan.items_per_unit < 1) plan.items_per_unit = 1;
  return plan;
}

struct DecodeItem {
  int64_t page = 0;
  uint64_t mask = 0;  // tokens attended to
};

KVASIR_HOST_DEVICE inline DecodeItem FindDecodeItem(const DecodePlan& plan,
                                                    const SelectionHeader& header,
                                                    const SelectionEntry* list, int64_t position,
                                                    int64_t index) {
  DecodeItem item;
  if (header.kind == SelectionHeader::Kind::kAll) {
    item.page = index;
    item.mask = ~uint64_t{0};
  } else if (index < plan.num_sink) {
    item.page = index;
    item.mask = TokenMask(0, header.sink_end - index * kPageTokens);
  } else if (index < plan.num_sink + plan.num_list) {
    const SelectionEntry& entry = list[index - plan.num_sink];
    const int64_t start = entry.page * kPageTokens;
    item.page = entry.page;
    item.mask = entry.live & TokenMask(header.sink_end - start, header.window_begin - start);
  } else {
    item.page = plan.first_window_page + index - plan.num_sink - plan.num_list;
    const int64_t start = item.page * kPageTokens;
    item.mask = TokenMask(header.window_begin - start, kPageTokens);
  }
  item.mask &= TokenMask(0, position + 1 - item.page * kPageTokens);
  return item;
}

}  // namespace kvasir::kernels
