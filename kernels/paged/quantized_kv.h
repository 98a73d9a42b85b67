// Writes and reads tokens of quantized KV (kv_codes.h). Readers decode what they need to bfloat16,
// which is exact, and go on as with bfloat16 KV. Thread-safe.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "kernels/base/cpu_isa.h"
#include "kernels/base/dtype.h"
#include "kernels/paged/dequantize.h"
#include "kernels/paged/paged_kv.h"

namespace kvasir::kernels {

// Codes `from` [head_dim] into `codes` [head_dim] and `scale`. REQUIRES: `dtype` is quantized.
void QuantizeToken(DType dtype, const float* from, int64_t head_dim, std::byte* codes,
                   std::byte* scale);
void QuantizeToken(DType dtype, const BFloat16* from, int64_t head_dim, std::byte* codes,
                   std::byte* scale);

// Decodes one token to `to` [head_dim]. REQUIRES: quantized KV.
void DequantizeToken(const KvLayout& layout, const std::byte* codes, const std::byte* scale,
                     BFloat16* to);

enum class PageSide : uint8_t { kKeys, kValues };

// Decodes the masked tokens of one side of a page to their places in `to` [kPageTokens, head_dim];
// leaves other places unchanged. `next_page`, or null, is prefetched. REQUIRES: quantized KV.
void DequantizeSide(const KvLayout& layout, PageSide side, const std::byte* page, uint64_t mask,
                    const std::byte* next_page, BFloat16* to);

// All keys, or all values, of a page as kernels read them.
struct PageElements {
  const std::byte* keys = nullptr;  // [kPageTokens, head_dim], in the element dtype
  const std::byte* values = nullptr;
};

// Bytes of memory that ReadPage needs.
constexpr int64_t DequantizedPageBytes(const KvLayout& layout) {
  return IsQuantized(layout.dtype) ? 2 * kPageTokens * layout.element_row_bytes() : 0;
}

// Returns the page's own memory, or, where the KV is quantized, the masked tokens decoded to
// `memory`.
PageElements ReadPage(const KvLayout& layout, const std::byte* page, uint64_t mask,
                      const std::byte* next_page, std::byte* memory);

// Returns the page's keys in the same way; `memory` has half the size.
const std::byte* ReadKeys(const KvLayout& layout, const std::byte* page, uint64_t mask,
                          const std::byte* next_page, std::byte* memory);

// The forms of Dequantize, for tests.
extern const IsaForms<DequantizeFn> kDequantizeForms;

}  // namespace kvasir::kernels
