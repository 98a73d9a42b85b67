// The pages that one selection row attends to, by number, so that parallel work can start anywhere
// in a row: pure arithmetic on the selection's header, shared by the GPU's kernels and their tests.
//
//   item   0 ..            num_sink ..            num_sink + num_list ..         num_items
//          pages of sink   list entries           pages of the window
//
// A page may be two items (sink and list, list and window), with disjoint masks. The same tokens as
// SelectedPages walks, in page_selection.h.
#pragma once

#include <cstdint>

#include "kernels/base/host_device.h"
#include "kernels/paged/compact_positions.h"
#include "kernels/paged/grouped_positions.h"
#include "kernels/paged/page_selection.h"

namespace kvasir::kernels {

struct RowItems {
  int64_t num_sink = 0;
  int64_t num_list = 0;
  int64_t first_window_page = 0;
  int64_t num_items = 0;
  int64_t last_position = 0;
};

struct RowItem {
  int64_t page = 0;
  uint64_t mask = 0;  // tokens attended to by the block's last query
};

// For a block whose last query is at `last_position`.
KVASIR_HOST_DEVICE inline RowItems NumberItems(const SelectionHeader& header,
                                               int64_t last_position) {
  RowItems items;
  items.last_position = last_position;
  const int64_t num_pages = last_position / kPageTokens + 1;
  if (header.kind == SelectionHeader::Kind::kAll) {
    items.num_items = num_pages;
    return items;
  }
  items.num_sink = (header.sink_end + kPageTokens - 1) / kPageTokens;
  items.num_list = header.count;
  items.first_window_page = header.window_begin / kPageTokens;
  items.num_items = items.num_sink + items.num_list + num_pages - items.first_window_page;
  return items;
}

// REQUIRES: 0 <= index < num_items.
KVASIR_HOST_DEVICE inline RowItem FindItem(const RowItems& items, const SelectionHeader& header,
                                           const SelectionEntry* list, int64_t index) {
  RowItem item;
  if (header.kind == SelectionHeader::Kind::kAll) {
    item = {.page = index, .mask = ~uint64_t{0}};
  } else if (index < items.num_sink) {
    item = {.page = index, .mask = TokenMask(0, header.sink_end - index * kPageTokens)};
  } else if (index < items.num_sink + items.num_list) {
    const SelectionEntry& entry = list[index - items.num_sink];
    const int64_t start = entry.page * kPageTokens;
    item = {.page = entry.page,
            .mask = entry.live & TokenMask(header.sink_end - start, header.window_begin - start)};
  } else {
    const int64_t page = items.first_window_page + index - items.num_sink - items.num_list;
    item = {.page = page, .mask = TokenMask(header.window_begin - page * kPageTokens, kPageTokens)};
  }
  item.mask &= TokenMask(0, items.last_position + 1 - item.page * kPageTokens);
  return item;
}

// Where an item's keys stand (compact_positions.h): the token t of its page at `first` + the tokens
// of `counted` before it.
struct ItemPositions {
  int32_t first = 0;
  uint64_t counted = 0;

  KVASIR_HOST_DEVICE int64_t of(int token) const {
    return first + CountBits(counted & ((uint64_t{1} << token) - 1));
  }
};

// REQUIRES: 0 <= index < num_items.
KVASIR_HOST_DEVICE inline ItemPositions FindPositions(const RowItems& items,
                                                      const SelectionHeader& header,
                                                      const SelectionEntry* list, int64_t index) {
  if (header.kind == SelectionHeader::Kind::kAll || index < items.num_sink) {
    return {.first = static_cast<int32_t>(index * kPageTokens), .counted = ~uint64_t{0}};
  }
  if (index < items.num_sink + items.num_list) {
    const SelectionEntry& entry = list[index - items.num_sink];
    return {.first = entry.pos0, .counted = entry.chosen};
  }
  const int64_t page = items.first_window_page + index - items.num_sink - items.num_list;
  return {.first = static_cast<int32_t>(QueryPosition(header, page * kPageTokens)),
          .counted = ~uint64_t{0}};
}

// Where a page's keys stand at grouped positions, for a query that stands where it sees far ones
// from: near ones are moved as far as it is.
struct GroupedItemPositions {
  int32_t first_far = 0;    // of the page's first token
  int32_t first_near = 0;   // of the same, were it near
  int32_t near_begin = 0;   // tokens from here on are near
  uint64_t group_ends = 0;  // the last tokens of groups

  KVASIR_HOST_DEVICE int64_t of(int token) const {
    if (token >= near_begin) return first_near + token;
    return first_far + CountBits(group_ends & ((uint64_t{1} << token) - 1));
  }
};

// For the query at `position`, as it stands at grouped.FarQuery(position).
KVASIR_HOST_DEVICE inline GroupedItemPositions FindGroupedPositions(const GroupedPositions& grouped,
                                                                    int64_t page,
                                                                    int64_t position) {
  const int64_t first = page * kPageTokens;
  const int64_t first_far = grouped.FarKey(first);
  const int64_t moved = position - grouped.FarQuery(position);
  GroupedItemPositions positions = {.first_far = static_cast<int32_t>(first_far),
                                    .first_near = static_cast<int32_t>(first - moved),
                                    .near_begin = CountBits(grouped.FarMask(page, position))};
  const int64_t next_group = (first_far + 1) * grouped.group_size - first;
  for (int64_t begin = next_group; begin <= kPageTokens; begin += grouped.group_size) {
    positions.group_ends |= uint64_t{1} << (begin - 1);
  }
  return positions;
}

// Whether no item before it has tokens of the item's page: to count pages. REQUIRES: the item has
// tokens.
KVASIR_HOST_DEVICE inline bool IsAnotherPage(const RowItems& items, const SelectionHeader& header,
                                             const SelectionEntry* list, int64_t index) {
  if (header.kind == SelectionHeader::Kind::kAll || index < items.num_sink) return true;
  const int64_t page = FindItem(items, header, list, index).page;
  if (page < items.num_sink) return false;
  const bool may_be_listed = index >= items.num_sink + items.num_list;
  if (!may_be_listed || page != items.first_window_page) return true;
  for (int64_t i = items.num_list - 1; i >= 0 && list[i].page >= page; --i) {
    if (list[i].page != page) continue;
    return FindItem(items, header, list, items.num_sink + i).mask == 0;
  }
  return true;
}

// How a decode row is cut into units of parallel work: so that the rows of one sequence are about
// as many units as a GPU has multiprocessors. Unit u of n takes the items u, u + n, u + 2n, ...:
// where a list is dense here and thin there, every unit has its share of both. A unit costs as much
// as a few items besides its own, so it has so many at least, but in a row's last share. The cut
// depends on nothing that differs from batch to batch.
inline constexpr int64_t kDecodeUnitsOfSequence = 128;
inline constexpr int64_t kDecodeUnitItems = 4;

KVASIR_HOST_DEVICE inline int64_t MaxDecodeUnits(int64_t num_kv_heads) {
  return num_kv_heads >= kDecodeUnitsOfSequence ? 1 : kDecodeUnitsOfSequence / num_kv_heads;
}
KVASIR_HOST_DEVICE inline int64_t NumDecodeUnits(int64_t num_items, int64_t num_kv_heads) {
  const int64_t units = MaxDecodeUnits(num_kv_heads);
  if (num_items == 0) return 1;  // it has nothing to attend to, and its result is that
  const int64_t worth = (num_items + kDecodeUnitItems - 1) / kDecodeUnitItems;
  return worth < units ? worth : units;
}

}  // namespace kvasir::kernels
