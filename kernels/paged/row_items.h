// The pages that one selection row attends to, by number, so that parallel work can start anywhere
// in a row. Pure arithmetic on the selection's header, shared by the GPU's kernels and their tests.
//
//   item   0 ..            num_sink ..            num_sink + num_list ..         num_items
//          pages of sink   list entries           pages of the window
//
// A page may be two items (sink and list, list and window) with disjoint masks. The items hold the
// same tokens as a walk of SelectedPages (page_selection.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

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
  uint64_t mask = 0;  // tokens that the tile's last query attends to
};

// Numbers the items for a tile whose last query is at `last_position`.
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

// Returns item `index`. REQUIRES: 0 <= index < num_items.
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

// Positions of an item's keys (compact_positions.h): token t of its page is at `first` + the number
// of tokens of `counted` before t.
struct ItemPositions {
  int32_t first = 0;
  uint64_t counted = 0;

  KVASIR_HOST_DEVICE int64_t of(int token) const {
    return first + CountBits(counted & ((uint64_t{1} << token) - 1));
  }
};

// Returns the positions of item `index`. REQUIRES: 0 <= index < num_items.
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

// Grouped positions of a page's keys, for a query at its far position. Near keys are shifted by the
// same distance as the query.
struct GroupedItemPositions {
  int32_t first_far = 0;    // position of the page's first token as a far key
  int32_t first_near = 0;   // the same as a near key
  int32_t near_begin = 0;   // first near token
  uint64_t group_ends = 0;  // last tokens of groups

  KVASIR_HOST_DEVICE int64_t of(int token) const {
    if (token >= near_begin) return first_near + token;
    return first_far + CountBits(group_ends & ((uint64_t{1} << token) - 1));
  }
};

// Returns the positions for the query at `position`, which is read at grouped.FarQuery(position).
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

// Returns whether no earlier item has tokens of the item's page, for counting pages. REQUIRES: the
// item has tokens.
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

// Cuts a decode row into units of parallel work. The rows of one sequence together make about as
// many units as a GPU has multiprocessors. Unit u of n takes items u, u + n, u + 2n, ..., so that
// every unit has a share of the dense and of the thin parts of a list. A unit has a fixed cost of a
// few items, so it has at least kDecodeUnitItems of them, except in a row's last share. The cut
// depends on nothing that differs from batch to batch.
inline constexpr int64_t kDecodeUnitsOfSequence = 128;
inline constexpr int64_t kDecodeUnitItems = 4;

KVASIR_HOST_DEVICE inline int64_t MaxDecodeUnits(int64_t num_kv_heads) {
  return num_kv_heads >= kDecodeUnitsOfSequence ? 1 : kDecodeUnitsOfSequence / num_kv_heads;
}
KVASIR_HOST_DEVICE inline int64_t NumDecodeUnits(int64_t num_items, int64_t num_kv_heads) {
  const int64_t units = MaxDecodeUnits(num_kv_heads);
  if (num_items == 0) return 1;  // the unit that writes the result of an empty row
  const int64_t worth = (num_items + kDecodeUnitItems - 1) / kDecodeUnitItems;
  return worth < units ? worth : units;
}

// More units seldom have so few items that a warp looks them up at once.
inline constexpr int64_t kMostUnitsAtOnce = 8;

// Returns how many units of a row of `units` units a CTA should take at once, where `rows` such
// rows are shared by `ctas` CTAs. A CTA loses about half a unit's time between two such tasks, and
// all wait for the one with the most. Changes no bits: each unit is attended to by itself.
inline int64_t DecodeUnitsAtOnce(int64_t rows, int64_t units, int64_t ctas) {
  int64_t best = 1;
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int64_t at_once = 1; at_once <= std::min(units, kMostUnitsAtOnce); ++at_once) {
    const int64_t tasks = rows * ((units + at_once - 1) / at_once);
    const int64_t half_units = (tasks + ctas - 1) / ctas * (2 * at_once + 1);
    if (half_units > least) continue;
    least = half_units;
    best = at_once;
  }
  return best;
}

}  // namespace kvasir::kernels
