// Key codes (the INT4 digest of Twilight, arXiv 2502.02770, section 4.2): every cached key as
// head_dim codes of 4 bits with a scale and a zero. Logits are estimated from them with an eighth
// of the bytes. Derived data, per token: the code that writes a key writes its codes, and a
// truncation needs no work. Made from the keys in their cached form, rotated or not.
//
//   zero  = float16(min_d k)         scale = float16 not below (max_d k - zero) / 15
//   code  = clamp(rint((k - zero) / scale), 0, 15)           k~ = code * scale + zero
//   q.k~  = scale * sum_d q_d code_d + zero * sum_d q_d
//
// A key of equal elements has scale 0 and codes 0. Elements are clamped to the range of float16. A
// key with a NaN has zero NaN, so its logits are NaN. |k - k~| <= scale / 2 + |k| / 2048 (rounding
// of zero) per element.
//
// The codes of a page:   words  [64][ceil(d / 8)] uint32    nibble n of word w is element
//                        scales [64] float16                8 w + {0, 2, 4, 6, 1, 3, 5, 7}[n]
//                        zeros  [64] float16
//
// so that (word >> 4 i) & 0x000f000f holds the neighbours 8 w + 2 i and 8 w + 2 i + 1.
// Thread-compatible; pages are independent.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"

#include "kernels/paged/paged_kv.h"

namespace kvasir::kernels {

// Writes the codes of `num_rows` keys [num_rows, head_dim] in the element dtype: tokens [first,
// first + num_rows) of their page.
void EncodeKeys(const KvLayout& layout, const std::byte* keys, int64_t first, int64_t num_rows,
                std::byte* page_codes);

// Writes the codes of a page's first `num_tokens` keys.
void EncodePage(const KvLayout& layout, const std::byte* page, int64_t num_tokens,
                std::byte* page_codes);

// Rebuilds the codes of all pages of a block from its first `num_tokens` keys. Returns the errors
// of RebuildBounds (digests.h).
absl::Status RebuildKeyCodes(const PagedKv& kv, int64_t slot, int64_t block, int64_t num_tokens);

// Writes k~ of one token of the page to `key`: head_dim floats.
void DecodeKey(const KvLayout& layout, const std::byte* page_codes, int64_t token, float* key);

}  // namespace kvasir::kernels
