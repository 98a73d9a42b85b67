#include "kernels/sparse/quest/page_ranking.h"

#include <algorithm>
#include <functional>

namespace kvasir::kernels {

void KeepBest(std::span<RankedPage> pages, int64_t count) {
  const auto end = pages.begin() + count;
  if (end != pages.end()) std::nth_element(pages.begin(), end, pages.end(), std::greater<>());
  std::sort(pages.begin(), end, [](RankedPage a, RankedPage b) { return a.page() < b.page(); });
}

}  // namespace kvasir::kernels
