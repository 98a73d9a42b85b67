#include "kernels/sparse/ranking.h"

#include <algorithm>
#include <functional>

namespace kvasir::kernels {

void KeepBest(std::span<Ranked> items, int64_t count) {
  const auto end = items.begin() + count;
  if (end != items.end()) std::nth_element(items.begin(), end, items.end(), std::greater<>());
  std::sort(items.begin(), end, [](Ranked a, Ranked b) { return a.item() < b.item(); });
}

}  // namespace kvasir::kernels
