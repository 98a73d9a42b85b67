// Chooses the best items by score, deterministically (rule R6). Called by selectors. Thread-safe.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include "kernels/base/host_device.h"

namespace kvasir::kernels {

// Maps scores to integers of the same order. NaN counts as -inf, -0 as 0.
KVASIR_HOST_DEVICE constexpr uint32_t OrderedScore(float score) {
  constexpr uint32_t kSign = 0x80000000u;
  if (score != score) score = -std::numeric_limits<float>::infinity();
  const uint32_t bits = std::bit_cast<uint32_t>(score + 0.0f);
  return (bits & kSign) != 0 ? ~bits : bits | kSign;
}
KVASIR_HOST_DEVICE constexpr float ScoreOfOrdered(uint32_t ordered) {
  constexpr uint32_t kSign = 0x80000000u;
  return std::bit_cast<float>((ordered & kSign) != 0 ? ordered ^ kSign : ~ordered);
}

// A score and the number of its item (a page, token or chunk) as one integer that orders as
// selections must: larger score first, then larger number (recency). NaN orders as -inf. Item
// numbers are below 2^32.
class Ranked {
 public:
  Ranked() = default;
  KVASIR_HOST_DEVICE Ranked(float score, int64_t item)
      : bits_(static_cast<uint64_t>(OrderedScore(score)) << 32 | static_cast<uint64_t>(item)) {}

  KVASIR_HOST_DEVICE int64_t item() const { return static_cast<int64_t>(bits_ & 0xffffffffu); }
  // -inf if the score was NaN.
  float score() const { return ScoreOfOrdered(static_cast<uint32_t>(bits_ >> 32)); }
  // Bucket of the item, of `buckets` (a power of two). Items in a higher bucket are better.
  size_t Bucket(size_t buckets) const {
    return static_cast<size_t>(bits_ >> (64 - std::countr_zero(buckets)));
  }
  KVASIR_HOST_DEVICE friend bool operator<(Ranked a, Ranked b) { return a.bits_ < b.bits_; }
  KVASIR_HOST_DEVICE friend bool operator>(Ranked a, Ranked b) { return b < a; }

 private:
  uint64_t bits_ = 0;
};

// Moves the `count` best to the front, ascending by item. REQUIRES: count <= items.size().
void KeepBest(std::span<Ranked> items, int64_t count);

}  // namespace kvasir::kernels
