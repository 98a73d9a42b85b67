// Grouped positions (SelfExtend, arXiv 2401.01325): like compact positions, a way to read contexts
// longer than the trained one with keys cached un-rotated. With groups of g tokens and a
// neighbourhood of w, the query at p sees the key at j
//
//   near, p - j < w:  both at their own positions               distance p - j
//   far:              the key at floor(j / g), the query at      distance of their groups
//                     floor(p / g) + w - floor(w / g)
//
// so that past the neighbourhood distances keep growing, g times slower. Near and far keys share
// one softmax. Positions do not depend on the selection. Thread-safe.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/base/executor.h"
#include "kernels/paged/page_keys.h"
#include "kernels/paged/page_selection.h"
#include "kernels/paged/paged_kv.h"
#include "kernels/rope/rope.h"

namespace kvasir::kernels {

struct GroupedPositions {
  int64_t group_size = 0;  // 0: positions are not grouped
  int64_t window = 0;      // w >= 1

  constexpr bool on() const { return group_size > 0; }
  constexpr int64_t FarKey(int64_t token) const { return token / group_size; }
  // At most `position`. Where the formula gives more, no key is far.
  constexpr int64_t FarQuery(int64_t position) const {
    return std::min(position, position / group_size + window - window / group_size);
  }
  // Returns the tokens of a page that are far for the query at `position`.
  constexpr uint64_t FarMask(int64_t page, int64_t position) const {
    return TokenMask(0, position - window + 1 - page * kPageTokens);
  }
  // Returns the longest context whose distances are all less than `trained_window`: (trained_window
  // - w) g + w tokens, in whole groups.
  constexpr int64_t LongestContext(int64_t trained_window) const {
    return (trained_window - window + window / group_size) * group_size;
  }
};

// Returns the first position after all queries and keys of the tiles.
inline int64_t EndOfPositions(std::span<const QueryTile> tiles) {
  int64_t end = 0;
  for (const QueryTile& tile : tiles) {
    end = std::max(end, tile.first_position + tile.num_rows);
  }
  return end;
}

// Rotate the page's wanted keys (page_keys.h) as far queries and as near queries see them.
inline void RotateFarKeys(const RopePositions& rope, const KvLayout& layout,
                          const GroupedPositions& grouped, const PageKeys& page, std::byte* to) {
  RotatePageKeys(
      rope, layout, page, [&](int64_t token) { return grouped.FarKey(token); }, to);
}
inline void RotateNearKeys(const RopePositions& rope, const KvLayout& layout, const PageKeys& page,
                           std::byte* to) {
  RotatePageKeys(
      rope, layout, page, [](int64_t token) { return token; }, to);
}

}  // namespace kvasir::kernels
