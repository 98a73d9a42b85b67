#include "kernels/sparse/common/ranking.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>

namespace kvasir::kernels {

namespace {

// If items are many, most are far below the best. A histogram of the leading bits of their scores
// finds the others, and only these are compared.
constexpr size_t kManyItems = 4096;
constexpr size_t kBuckets = 2048;

// Moves the items in the buckets of the `count` best to the front and returns their number.
size_t KeepBestBuckets(std::span<Ranked> items, size_t count) {
  std::array<uint32_t, kBuckets> sizes = {};
  for (const Ranked item : items) ++sizes[item.Bucket(kBuckets)];
  size_t lowest = kBuckets, kept = 0;
  while (kept < count) kept += sizes[--lowest];
  std::partition(items.begin(), items.end(),
                 [&](Ranked item) { return item.Bucket(kBuckets) >= lowest; });
  return kept;
}

}  // namespace

void KeepBest(std::span<Ranked> items, int64_t count) {
  if (items.size() >= kManyItems) {
    items = items.first(KeepBestBuckets(items, static_cast<size_t>(count)));
  }
  const auto end = items.begin() + count;
  if (end != items.end()) std::nth_element(items.begin(), end, items.end(), std::greater<>());
  std::sort(items.begin(), end, [](Ranked a, Ranked b) { return a.item() < b.item(); });
}

}  // namespace kvasir::kernels
