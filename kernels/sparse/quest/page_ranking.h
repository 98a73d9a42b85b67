// Choosing the best pages by score, deterministically. Called by selectors. Thread-safe.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>

namespace kvasir::kernels {

// A (score, page) pair as one integer that orders as selections must: larger score first, then the
// larger page (recency); NaN orders as -inf. Pages are below 2^32.
class RankedPage {
 public:
  RankedPage() = default;
  RankedPage(float score, int64_t page)
      : bits_(static_cast<uint64_t>(Ordered(score)) << 32 | static_cast<uint64_t>(page)) {}

  int64_t page() const { return static_cast<int64_t>(bits_ & 0xffffffffu); }
  // -inf where it was NaN.
  float score() const {
    const uint32_t ordered = static_cast<uint32_t>(bits_ >> 32);
    return std::bit_cast<float>((ordered & kSign) != 0 ? ordered ^ kSign : ~ordered);
  }
  friend bool operator<(RankedPage a, RankedPage b) { return a.bits_ < b.bits_; }
  friend bool operator>(RankedPage a, RankedPage b) { return b < a; }

 private:
  static constexpr uint32_t kSign = 0x80000000u;
  // Maps floats to integers of the same order; -0 counts as 0.
  static uint32_t Ordered(float score) {
    if (std::isnan(score)) score = -std::numeric_limits<float>::infinity();
    const uint32_t bits = std::bit_cast<uint32_t>(score + 0.0f);
    return (bits & kSign) != 0 ? ~bits : bits | kSign;
  }

  uint64_t bits_ = 0;
};

// Moves the `count` best to the front, ascending by page. REQUIRES: count <= pages.size().
void KeepBest(std::span<RankedPage> pages, int64_t count);

}  // namespace kvasir::kernels
