// Rotates a page's keys, cached un-rotated, to the positions at which attention sees them. Shared
// by compact_positions.h and grouped_positions.h. Thread-safe.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/paged/page_selection.h"
#include "kernels/paged/paged_kv.h"
#include "kernels/rope/rope.h"

namespace kvasir::kernels {

struct PageKeys {
  const std::byte* keys = nullptr;  // [kPageTokens, head_dim], in the element dtype
  int64_t page = 0;
  uint64_t mask = 0;  // the wanted tokens
};

// Writes the wanted keys, each rotated to position_of(token), to their places in `to` [kPageTokens,
// head_dim]. Leaves the other places unchanged. Rotates neighbours together as long as their
// positions are consecutive.
template <typename PositionOf>
void RotatePageKeys(const RopePositions& rope, const KvLayout& layout, const PageKeys& page,
                    const PositionOf& position_of, std::byte* to) {
  const auto position = [&](int64_t t) { return position_of(page.page * kPageTokens + t); };
  for (uint64_t rest = page.mask; rest != 0;) {
    const int64_t begin = std::countr_zero(rest);
    const int64_t neighbours = std::countr_one(rest >> begin);
    const int64_t first = position(begin);
    int64_t count = 1;
    while (count < neighbours && position(begin + count) == first + count) ++count;
    const int64_t offset = begin * layout.element_row_bytes();
    std::memcpy(to + offset, page.keys + offset,
                static_cast<size_t>(count * layout.element_row_bytes()));
    rope.Rotate(to + offset, layout.element_dtype(), count, first);
    rest &= ~TokenMask(begin, begin + count);
  }
}

}  // namespace kvasir::kernels
