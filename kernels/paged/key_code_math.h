// Where a token's key codes lie and what they are (key_codes.h), for CPU and GPU alike.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "kernels/base/float16.h"
#include "kernels/base/host_device.h"
#include "kernels/paged/paged_kv.h"

namespace kvasir::kernels {

inline constexpr int64_t kWordCodes = 8;
inline constexpr float kMaxCode = 15;

// Where element i stands in its word.
KVASIR_HOST_DEVICE constexpr int64_t Nibble(int64_t i) {
  const int64_t in_word = i % kWordCodes;
  return in_word / 2 + in_word % 2 * 4;
}

// The code of element i of a key.
KVASIR_HOST_DEVICE constexpr uint32_t KeyCode(const uint32_t* words, int64_t i) {
  return words[i / kWordCodes] >> (4 * Nibble(i)) & 15u;
}

// A token's part of its page's codes.
struct TokenCodes {
  KVASIR_HOST_DEVICE TokenCodes(const KvLayout& layout, const std::byte* page, int64_t token) {
    std::byte* codes = const_cast<std::byte*>(page);
    const int64_t num_words = layout.key_code_words();
    words = reinterpret_cast<uint32_t*>(codes) + token * num_words;
    scale = reinterpret_cast<Float16*>(codes + kPageTokens * num_words * 4) + token;
    zero = scale + kPageTokens;
  }
  uint32_t* words;
  Float16* scale;
  Float16* zero;
};

// An element as it is coded; NaN stays NaN.
KVASIR_HOST_DEVICE constexpr float CodedElement(float element) {
  return std::clamp(element, -kFloat16Max, float{kFloat16Max});
}

struct KeyGrid {
  Float16 scale;  // 0: all codes are 0
  Float16 zero;
};

// Of the coded elements of a key: their first least and greatest, and whether there is a NaN.
KVASIR_HOST_DEVICE inline KeyGrid MakeKeyGrid(float min, float max, bool is_nan) {
  KeyGrid grid;
  grid.zero = Float16(is_nan ? std::numeric_limits<float>::quiet_NaN() : min);
  if (is_nan || max == min) return grid;
  grid.scale = RoundUpToFloat16(std::max(0.0f, (max - static_cast<float>(grid.zero)) / kMaxCode));
  return grid;
}

// The element's nibble, in its place in the word. REQUIRES: scale > 0.
KVASIR_HOST_DEVICE inline uint32_t EncodeElement(float element, int64_t i, float scale,
                                                 float zero) {
  const float code =
      std::clamp(std::nearbyint((CodedElement(element) - zero) / scale), 0.0f, float{kMaxCode});
  return static_cast<uint32_t>(code) << (4 * Nibble(i));
}

}  // namespace kvasir::kernels
