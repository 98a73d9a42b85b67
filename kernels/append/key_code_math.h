// Layout and values of a token's key codes (key_codes.h), for CPU and GPU.
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

// Returns the nibble of element i within its word.
KVASIR_HOST_DEVICE constexpr int64_t Nibble(int64_t i) {
  const int64_t in_word = i % kWordCodes;
  return in_word / 2 + in_word % 2 * 4;
}

// Returns the code of element i of a key.
KVASIR_HOST_DEVICE constexpr uint32_t KeyCode(const uint32_t* words, int64_t i) {
  return words[i / kWordCodes] >> (4 * Nibble(i)) & 15u;
}

// One token's part of its page's codes.
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

// Returns the element's value before coding. NaN stays NaN.
KVASIR_HOST_DEVICE constexpr float CodedElement(float element) {
  return std::clamp(element, -kFloat16Max, float{kFloat16Max});
}

struct KeyGrid {
  Float16 scale;  // 0: all codes are 0
  Float16 zero;
};

// Makes the grid from a key's coded elements: the first least one, the first greatest one, and
// whether one is NaN.
KVASIR_HOST_DEVICE inline KeyGrid MakeKeyGrid(float min, float max, bool is_nan) {
  KeyGrid grid;
  grid.zero = Float16(is_nan ? std::numeric_limits<float>::quiet_NaN() : min);
  if (is_nan || max == min) return grid;
  grid.scale = RoundUpToFloat16(std::max(0.0f, (max - static_cast<float>(grid.zero)) / kMaxCode));
  return grid;
}

// Returns the element's code shifted to its place in the word. REQUIRES: scale > 0.
KVASIR_HOST_DEVICE inline uint32_t EncodeElement(float element, int64_t i, float scale,
                                                 float zero) {
  const float code =
      std::clamp(std::nearbyint((CodedElement(element) - zero) / scale), 0.0f, float{kMaxCode});
  return static_cast<uint32_t>(code) << (4 * Nibble(i));
}

}  // namespace kvasir::kernels
