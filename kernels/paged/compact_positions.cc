#include "kernels/paged/compact_positions.h"

#include <algorithm>
#include <cstring>

namespace kvasir::kernels {

void ReservePositions(const PageSelection& selection, std::span<const QueryBlock> blocks,
                      int64_t num_kv_heads, RopePositions& rope, Executor& executor) {
  int64_t end = 0;
  for (int64_t row = 0; row < selection.num_rows; ++row) {
    const QueryBlock& block = blocks[static_cast<size_t>(row / num_kv_heads)];
    const int64_t last = block.first_position + block.num_rows - 1;
    end = std::max(end, QueryPosition(selection.header(row), last) + 1);
  }
  rope.Reserve(end, executor);
}

void RotateKeys(const RopePositions& rope, const KvLayout& layout, const SelectionHeader& header,
                const AttendedPage& page, std::byte* to) {
  const auto position = [&](int64_t t) {
    return TokenPosition(header, page.entry, page.page * kPageTokens + t);
  };
  // Neighbours are rotated together as far as their positions are neighbours, too.
  for (uint64_t rest = page.mask; rest != 0;) {
    const int64_t begin = std::countr_zero(rest);
    const int64_t neighbours = std::countr_one(rest >> begin);
    const int64_t first = position(begin);
    int64_t count = 1;
    while (count < neighbours && position(begin + count) == first + count) ++count;
    const int64_t offset = begin * layout.row_bytes();
    std::memcpy(to + offset, page.keys + offset, static_cast<size_t>(count * layout.row_bytes()));
    rope.Rotate(to + offset, layout.dtype, count, first);
    rest &= ~TokenMask(begin, begin + count);
  }
}

}  // namespace kvasir::kernels
