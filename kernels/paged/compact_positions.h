// Compact positions, for keys that are cached un-rotated: the tokens that a selection row attends
// to get consecutive positions. A context longer than the trained one then never shows the model an
// unknown distance (InfiniteHiP, arXiv 2502.08910, streaming RoPE; TokenSelect, arXiv 2411.02886).
// Positions are assigned once, when the selector has chosen:
//
//   kind all :  a token keeps its own
//   kind list:  sink token j    j
//               list token      pos0 of its entry + number of earlier chosen tokens of the entry
//               window token j  compact_length + j - window_begin, also for the query at p
//
// Tokens that pruners clear in `live` leave gaps, and so do listed tokens that lie in sink or
// window: a list keeps its positions while the window slides over it. Thread-safe.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/base/executor.h"
#include "kernels/paged/page_selection.h"
#include "kernels/paged/paged_kv.h"
#include "kernels/rope/rope.h"

namespace kvasir::kernels {

// Assigns the positions of all rows. Runs after the selector and before pruners.
inline void AssignPositions(const PageSelection& selection) {
  for (int64_t row = 0; row < selection.num_rows; ++row) {
    SelectionHeader& header = selection.header(row);
    SelectionEntry* list = selection.list(row);
    header.compact_length = header.sink_end;
    for (int32_t i = 0; i < header.count; ++i) {
      list[i].pos0 = static_cast<int32_t>(header.compact_length);
      header.compact_length += std::popcount(list[i].chosen);
    }
  }
}

// Returns the position of a query, which is a token of the window.
constexpr int64_t QueryPosition(const SelectionHeader& header, int64_t position) {
  if (header.kind == SelectionHeader::Kind::kAll) return position;
  return header.compact_length + position - header.window_begin;
}

// Returns the position of a token that the row attends to. `entry` is the list's entry of its page,
// or null.
constexpr int64_t TokenPosition(const SelectionHeader& header, const SelectionEntry* entry,
                                int64_t token) {
  if (header.kind == SelectionHeader::Kind::kAll || token < header.sink_end) return token;
  if (token >= header.window_begin) return QueryPosition(header, token);
  return entry->pos0 + std::popcount(entry->chosen & TokenMask(0, token % kPageTokens));
}

// Prepares `rope` for all positions of the rows. REQUIRES: rows = tiles x num_kv_heads.
void ReservePositions(const PageSelection& selection, std::span<const QueryTile> tiles,
                      int64_t num_kv_heads, RopePositions& rope, Executor& executor);

// A page that a row attends to.
struct AttendedPage {
  const std::byte* keys = nullptr;  // [kPageTokens, head_dim], in the element dtype
  int64_t page = 0;
  uint64_t mask = 0;                      // attended tokens
  const SelectionEntry* entry = nullptr;  // in the row's list, or null
};

// Rotates the page's attended keys to their positions and writes them to their places in `to`
// [kPageTokens, head_dim]. Leaves the other places unchanged.
void RotateKeys(const RopePositions& rope, const KvLayout& layout, const SelectionHeader& header,
                const AttendedPage& page, std::byte* to);

}  // namespace kvasir::kernels
