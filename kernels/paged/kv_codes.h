// The codes of quantized KV: a key or value as 8 bits an element with a scale, which is a power of
// two of the token's own. So a token's codes depend on that token alone, whatever was written
// before or after it, and every decoded element is a normal bfloat16 or 0, without rounding
// (docs/decisions/0019-quantized-kv-has-a-power-of-two-for-each-token.md).
//
//   scale      byte e: 2^(e - 127); 255: the token is NaN. The least for which no code is clipped,
//              and at least kLeastScale.
//   fp8_e4m3   sign, 4 bits of exponent, 3 of mantissa; largest 448; x / 2^(e - 127) rounded to
//              nearest even
//   int8       -127 to 127; likewise
//
// A token with an element that is not finite, or of a magnitude of 2^127 or more, is NaN.
// Thread-safe.
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/base/dtype.h"
#include "kernels/base/host_device.h"

namespace kvasir::kernels {

inline constexpr int kScaleBias = 127;
inline constexpr uint8_t kNanScale = 255;
// Below it the smallest code would be no normal number: 2^-9 * 2^-117 = 2^-126.
inline constexpr uint8_t kLeastScale = kScaleBias - 117;
inline constexpr float kFloat8Max = 448;
inline constexpr float kInt8Max = 127;

// Returns 2^exponent. REQUIRES: -126 <= exponent <= 127.
constexpr float PowerOfTwo(int exponent) {
  return std::bit_cast<float>(static_cast<uint32_t>(exponent + kScaleBias) << 23);
}

// Returns the scale of a token whose largest magnitude is given. REQUIRES: `dtype` is quantized.
constexpr uint8_t ScaleOf(DType dtype, float largest) {
  if (!(largest < 0x1p127f)) return kNanScale;
  // A copy, because device code has no addresses of host constants.
  const float greatest = dtype == DType::kInt8 ? kInt8Max : kFloat8Max;
  const auto code_max = std::bit_cast<uint32_t>(greatest);
  // largest = a 2^m and code_max = b 2^n with a, b in [1, 2): the least power is 2^(m - n), or
  // twice that where a > b.
  constexpr uint32_t kMantissa = 0x7fffff;
  const uint32_t bits = std::bit_cast<uint32_t>(largest);
  const int power = static_cast<int>(bits >> 23) - static_cast<int>(code_max >> 23) +
                    ((bits & kMantissa) > (code_max & kMantissa) ? 1 : 0) + kScaleBias;
  return static_cast<uint8_t>(power < kLeastScale ? int{kLeastScale} : power);
}

// Returns the factor of a token's elements, 2^(127 - scale), before they are coded. REQUIRES: the
// scale is not kNanScale.
constexpr float CodingFactor(uint8_t scale) { return PowerOfTwo(kScaleBias - scale); }

// Returns the code of x. REQUIRES: |x| <= kFloat8Max.
constexpr uint8_t EncodeFloat8(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const auto sign = static_cast<uint8_t>((bits >> 24) & 0x80u);
  if (magnitude < std::bit_cast<uint32_t>(0x1p-6f)) {
    // Below the least normal number codes are multiples of 2^-9, the step of floats from 2^14 on.
    const float shifted = std::bit_cast<float>(magnitude) + 0x1p14f;
    return sign | static_cast<uint8_t>(std::bit_cast<uint32_t>(shifted) & 0xfu);
  }
  const uint32_t rounded = magnitude + 0x7ffffu + ((magnitude >> 20) & 1u);
  return sign | static_cast<uint8_t>((rounded >> 20) - (120u << 3));
}

constexpr float DecodeFloat8(uint8_t code) {
  const uint32_t magnitude = code & 0x7fu;
  const float value = magnitude < 8 ? static_cast<float>(magnitude) * 0x1p-9f
                                    : std::bit_cast<float>((magnitude << 20) + (120u << 23));
  return (code & 0x80u) != 0 ? -value : value;
}

// Returns the code of x, as its bits. REQUIRES: |x| <= kInt8Max.
constexpr uint8_t EncodeInt8(float x) {
  // Adding 1.5 * 2^23 leaves the integer, rounded to nearest even, at the end of the mantissa.
  return static_cast<uint8_t>(std::bit_cast<uint32_t>(x + 0x1.8p23f));
}

constexpr float DecodeInt8(uint8_t code) { return static_cast<float>(static_cast<int8_t>(code)); }

// Returns what `code` stands for, before its scale.
constexpr float DecodeElement(DType dtype, uint8_t code) {
  return dtype == DType::kInt8 ? DecodeInt8(code) : DecodeFloat8(code);
}

}  // namespace kvasir::kernels
