// Compact positions: where keys are cached un-rotated, what a selection row attends to is read as
// if it stood side by side, so that contexts longer than the model was trained for never show it a
// distance it does not know (InfiniteHiP, arXiv 2502.08910, streaming RoPE; TokenSelect, arXiv
// 2411.02886). Positions are given once, when it is known what a selector chose:
//
//   kind all :  a token's own
//   kind list:  sink token j    j
//               list token      pos0 of its entry + chosen tokens of the entry before it
//               window token j  compact_length + j - window_begin, and so the query at p
//
// What pruners clear in `live` leaves its gap, and so does what a list holds of sink and window: a
// list keeps its positions while the window slides over it. Thread-safe.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/base/executor.h"
#include "kernels/dense/rope.h"
#include "kernels/paged/page_selection.h"
#include "kernels/paged/paged_kv.h"

namespace kvasir::kernels {

// Gives all rows their positions: behind the selector, before pruners.
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

// Of a query, which is a token of the window.
constexpr int64_t QueryPosition(const SelectionHeader& header, int64_t position) {
  if (header.kind == SelectionHeader::Kind::kAll) return position;
  return header.compact_length + position - header.window_begin;
}

// Of a token that the row attends to; `entry` is the list's of its page, null where there is none.
constexpr int64_t TokenPosition(const SelectionHeader& header, const SelectionEntry* entry,
                                int64_t token) {
  if (header.kind == SelectionHeader::Kind::kAll || token < header.sink_end) return token;
  if (token >= header.window_begin) return QueryPosition(header, token);
  return entry->pos0 + std::popcount(entry->chosen & TokenMask(0, token % kPageTokens));
}

// Makes all positions of the rows known to `rope`. REQUIRES: rows = blocks x num_kv_heads.
void ReservePositions(const PageSelection& selection, std::span<const QueryBlock> blocks,
                      int64_t num_kv_heads, RopePositions& rope, Executor& executor);

// A page as a row attends to it.
struct AttendedPage {
  const std::byte* keys = nullptr;  // [kPageTokens, head_dim], as cached
  int64_t page = 0;
  uint64_t mask = 0;                      // tokens that are attended to
  const SelectionEntry* entry = nullptr;  // of the row's list; null: none
};

// Writes the page's attended keys, rotated to their positions, to their places in
// `to` [kPageTokens, head_dim]; the others stay as they are.
void RotateKeys(const RopePositions& rope, const KvLayout& layout, const SelectionHeader& header,
                const AttendedPage& page, std::byte* to);

}  // namespace kvasir::kernels
