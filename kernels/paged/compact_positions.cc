#include "kernels/paged/compact_positions.h"

#include <algorithm>

#include "kernels/paged/page_keys.h"

namespace kvasir::kernels {

void ReservePositions(const PageSelection& selection, std::span<const QueryTile> tiles,
                      int64_t num_kv_heads, RopePositions& rope, Executor& executor) {
  int64_t end = 0;
  for (int64_t row = 0; row < selection.num_rows; ++row) {
    const QueryTile& tile = tiles[static_cast<size_t>(row / num_kv_heads)];
    const int64_t last = tile.first_position + tile.num_rows - 1;
    end = std::max(end, QueryPosition(selection.header(row), last) + 1);
  }
  rope.Reserve(end, executor);
}

void RotateKeys(const RopePositions& rope, const KvLayout& layout, const SelectionHeader& header,
                const AttendedPage& page, std::byte* to) {
  RotatePageKeys(
      rope, layout, {.keys = page.keys, .page = page.page, .mask = page.mask},
      [&](int64_t token) { return TokenPosition(header, page.entry, token); }, to);
}

}  // namespace kvasir::kernels
