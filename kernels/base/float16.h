// IEEE 754 binary16 as storage, for digests: arithmetic happens in float. Conversions are written
// out, so that every compiler and machine gives the same bits.
#pragma once

#include <bit>
#include <cstdint>

namespace kvasir::kernels {

inline constexpr float kFloat16Max = 65504.0f;

struct Float16 {
  uint16_t bits = 0;

  constexpr Float16() = default;
  // Rounds to nearest even; beyond the range it becomes infinite; NaN stays NaN.
  constexpr explicit Float16(float value) {
    const uint32_t all = std::bit_cast<uint32_t>(value);
    const uint32_t magnitude = all & 0x7fffffffu;
    const uint16_t sign = static_cast<uint16_t>((all >> 16) & 0x8000u);
    uint32_t rounded = 0;
    if (magnitude > 0x7f800000u) {
      rounded = 0x7e00u;
    } else if (magnitude >= 0x477ff000u) {  // from halfway past the largest number on
      rounded = 0x7c00u;
    } else if (magnitude < 0x38800000u) {
      // Denormal: adding 1/2 leaves the wanted bits, rounded, at the end of the mantissa.
      rounded = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
    } else {
      rounded = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
    }
    bits = static_cast<uint16_t>(sign | rounded);
  }

  constexpr explicit operator float() const {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
    const uint32_t magnitude = bits & 0x7fffu;
    if (magnitude >= 0x7c00u) {
      return std::bit_cast<float>(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    }
    if (magnitude < 0x400u) {
      const float small = static_cast<float>(magnitude) * 0x1p-24f;
      return sign != 0 ? -small : small;
    }
    return std::bit_cast<float>(sign | ((magnitude << 13) + 0x38000000u));
  }
};

// Returns the smallest number that is not below `value`. REQUIRES: 0 <= value <= kFloat16Max.
constexpr Float16 RoundUpToFloat16(float value) {
  Float16 rounded(value);
  if (static_cast<float>(rounded) < value) ++rounded.bits;
  return rounded;
}

}  // namespace kvasir::kernels
