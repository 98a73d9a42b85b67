#include "kernels/append/key_codes.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/append/digests.h"
#include "kernels/append/key_code_math.h"
#include "kernels/base/dtype.h"
#include "kernels/paged/page_selection.h"
#include "kernels/paged/quantized_kv.h"

namespace kvasir::kernels {
namespace {

template <typename Kv>
void EncodeKey(const KvLayout& layout, const Kv* key, const TokenCodes& to) {
  const int64_t d = layout.head_dim;
  float min = CodedElement(static_cast<float>(key[0]));
  float max = min;
  bool is_nan = false;
  for (int64_t i = 0; i < d; ++i) {
    const float element = CodedElement(static_cast<float>(key[i]));
    min = std::min(min, element);
    max = std::max(max, element);
    is_nan |= std::isnan(element);
  }
  const KeyGrid grid = MakeKeyGrid(min, max, is_nan);
  *to.scale = grid.scale;
  *to.zero = grid.zero;
  std::fill_n(to.words, layout.key_code_words(), 0u);
  const float scale = static_cast<float>(grid.scale);
  const float zero = static_cast<float>(grid.zero);
  for (int64_t i = 0; i < d && scale != 0; ++i) {
    to.words[i / kWordCodes] |= EncodeElement(static_cast<float>(key[i]), i, scale, zero);
  }
}

}  // namespace

void EncodeKeys(const KvLayout& layout, const std::byte* keys, int64_t first, int64_t num_rows,
                std::byte* page_codes) {
  for (int64_t r = 0; r < num_rows; ++r) {
    const std::byte* key = keys + r * layout.element_row_bytes();
    const TokenCodes to(layout, page_codes, first + r);
    if (layout.dtype == DType::kFloat32) {
      EncodeKey(layout, reinterpret_cast<const float*>(key), to);
    } else {
      EncodeKey(layout, reinterpret_cast<const BFloat16*>(key), to);
    }
  }
}

void EncodePage(const KvLayout& layout, const std::byte* page, int64_t num_tokens,
                std::byte* page_codes) {
  std::vector<std::byte> memory(static_cast<size_t>(DequantizedPageBytes(layout) / 2));
  const std::byte* keys =
      ReadKeys(layout, page, TokenMask(0, num_tokens), /*next_page=*/nullptr, memory.data());
  EncodeKeys(layout, keys, 0, num_tokens, page_codes);
}

absl::Status RebuildKeyCodes(const PagedKv& kv, int64_t slot, int64_t block, int64_t num_tokens) {
  return ForEachPageOfBlock("rebuild_key_codes", kv, slot, block, num_tokens,
                            [&](int64_t layer, int64_t head, const std::byte* page) {
                              EncodePage(kv.layout, page, num_tokens,
                                         kv.KeyCodes(slot, block, layer, head));
                            });
}

void DecodeKey(const KvLayout& layout, const std::byte* page_codes, int64_t token, float* key) {
  const TokenCodes codes(layout, page_codes, token);
  const float scale = static_cast<float>(*codes.scale);
  const float zero = static_cast<float>(*codes.zero);
  for (int64_t i = 0; i < layout.head_dim; ++i) {
    key[i] = static_cast<float>(KeyCode(codes.words, i)) * scale + zero;
  }
}

}  // namespace kvasir::kernels
