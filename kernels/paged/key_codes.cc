#include "kernels/paged/key_codes.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/base/dtype.h"
#include "kernels/base/float16.h"
#include "kernels/paged/digests.h"

namespace kvasir::kernels {
namespace {

constexpr int64_t kWordCodes = 8;
// Where element i stands in its word: key_codes.h.
constexpr int64_t Nibble(int64_t i) {
  const int64_t in_word = i % kWordCodes;
  return in_word / 2 + in_word % 2 * 4;
}
constexpr float kMaxCode = 15;

// A token's part of its page's codes.
struct TokenCodes {
  TokenCodes(const KvLayout& layout, const std::byte* page, int64_t token) {
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

template <typename Kv>
void EncodeKey(const KvLayout& layout, const Kv* key, const TokenCodes& to) {
  const int64_t d = layout.head_dim;
  const auto element = [&](int64_t i) {
    return std::clamp(static_cast<float>(key[i]), -kFloat16Max, kFloat16Max);  // keeps NaN
  };
  float min = element(0);
  float max = element(0);
  bool is_nan = false;
  for (int64_t i = 0; i < d; ++i) {
    min = std::min(min, element(i));
    max = std::max(max, element(i));
    is_nan |= std::isnan(element(i));
  }
  std::fill_n(to.words, layout.key_code_words(), 0u);
  *to.zero = Float16(is_nan ? std::numeric_limits<float>::quiet_NaN() : min);
  const float zero = static_cast<float>(*to.zero);
  const bool flat = is_nan || max == min;
  *to.scale = flat ? Float16() : RoundUpToFloat16(std::max(0.0f, (max - zero) / kMaxCode));
  const float scale = static_cast<float>(*to.scale);
  if (scale == 0) return;
  for (int64_t i = 0; i < d; ++i) {
    const float code = std::clamp(std::nearbyint((element(i) - zero) / scale), 0.0f, kMaxCode);
    to.words[i / kWordCodes] |= static_cast<uint32_t>(code) << (4 * Nibble(i));
  }
}

}  // namespace

void EncodeKeys(const KvLayout& layout, const std::byte* keys, int64_t first, int64_t num_rows,
                std::byte* page_codes) {
  for (int64_t r = 0; r < num_rows; ++r) {
    const std::byte* key = keys + r * layout.row_bytes();
    const TokenCodes to(layout, page_codes, first + r);
    if (layout.dtype == DType::kFloat32) {
      EncodeKey(layout, reinterpret_cast<const float*>(key), to);
    } else {
      EncodeKey(layout, reinterpret_cast<const BFloat16*>(key), to);
    }
  }
}

absl::Status RebuildKeyCodes(const PagedKv& kv, int64_t slot, int64_t block, int64_t num_tokens) {
  return ForEachPageOfBlock("rebuild_key_codes", kv, slot, block, num_tokens,
                            [&](int64_t layer, int64_t head, const std::byte* page) {
                              EncodeKeys(kv.layout, page, 0, num_tokens,
                                         kv.KeyCodes(slot, block, layer, head));
                            });
}

void DecodeKey(const KvLayout& layout, const std::byte* page_codes, int64_t token, float* key) {
  const TokenCodes codes(layout, page_codes, token);
  const float scale = static_cast<float>(*codes.scale);
  const float zero = static_cast<float>(*codes.zero);
  for (int64_t i = 0; i < layout.head_dim; ++i) {
    const uint32_t code = codes.words[i / kWordCodes] >> (4 * Nibble(i)) & 15u;
    key[i] = static_cast<float>(code) * scale + zero;
  }
}

}  // namespace kvasir::kernels
