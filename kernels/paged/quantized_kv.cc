#include "kernels/paged/quantized_kv.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/paged/kv_codes.h"

namespace kvasir::kernels {
namespace {

template <typename From>
void Quantize(DType dtype, const From* from, int64_t head_dim, std::byte* codes, std::byte* scale) {
  float largest = 0;
  for (int64_t i = 0; i < head_dim; ++i) {
    const float magnitude = std::abs(static_cast<float>(from[i]));
    largest = magnitude <= largest ? largest : magnitude;  // takes a NaN, and keeps it:
    if (std::isnan(largest)) break;
  }
  const uint8_t power = ScaleOf(dtype, largest);
  *scale = std::byte{power};
  if (power == kNanScale) {
    std::fill_n(codes, head_dim, std::byte{0});
    return;
  }
  const float factor = CodingFactor(power);
  for (int64_t i = 0; i < head_dim; ++i) {
    const float x = static_cast<float>(from[i]) * factor;
    codes[i] = std::byte{dtype == DType::kInt8 ? EncodeInt8(x) : EncodeFloat8(x)};
  }
}

}  // namespace

void QuantizeToken(DType dtype, const float* from, int64_t head_dim, std::byte* codes,
                   std::byte* scale) {
  Quantize(dtype, from, head_dim, codes, scale);
}
void QuantizeToken(DType dtype, const BFloat16* from, int64_t head_dim, std::byte* codes,
                   std::byte* scale) {
  Quantize(dtype, from, head_dim, codes, scale);
}

void DequantizePlain(const DequantizeParams& p) {
  const DType dtype = p.is_int8 ? DType::kInt8 : DType::kFloat8E4M3;
  for (uint64_t rest = p.mask; rest != 0; rest &= rest - 1) {
    const int64_t token = std::countr_zero(rest);
    const uint8_t power = p.scales[token];
    const float factor = power == kNanScale ? std::numeric_limits<float>::quiet_NaN()
                                            : PowerOfTwo(int{power} - kScaleBias);
    for (int64_t i = token * p.head_dim; i < (token + 1) * p.head_dim; ++i) {
      p.to[i] = BFloat16(DecodeElement(dtype, p.codes[i]) * factor).bits;
    }
  }
}

const IsaForms<DequantizeFn> kDequantizeForms = {.portable = DequantizePlain,
                                                 .neon = KVASIR_ON_ARM(DequantizeNeon),
                                                 .avx2 = KVASIR_ON_X86(DequantizeAvx2),
                                                 .avx512 = KVASIR_ON_X86(DequantizeAvx512)};

void DequantizeToken(const KvLayout& layout, const std::byte* codes, const std::byte* scale,
                     BFloat16* to) {
  ChooseForm(kDequantizeForms)({.codes = reinterpret_cast<const uint8_t*>(codes),
                                .scales = reinterpret_cast<const uint8_t*>(scale),
                                .is_int8 = layout.dtype == DType::kInt8,
                                .head_dim = layout.head_dim,
                                .mask = 1,
                                .to = reinterpret_cast<uint16_t*>(to)});
}

void DequantizeSide(const KvLayout& layout, PageSide side, const std::byte* page, uint64_t mask,
                    const std::byte* next_page, BFloat16* to) {
  const int64_t offset = side == PageSide::kKeys ? 0 : layout.v_offset();
  const int64_t scales = layout.scales_offset() + (side == PageSide::kKeys ? 0 : kPageTokens);
  const auto* next = next_page == nullptr ? nullptr : next_page + offset;
  ChooseForm(kDequantizeForms)({.codes = reinterpret_cast<const uint8_t*>(page + offset),
                                .scales = reinterpret_cast<const uint8_t*>(page + scales),
                                .is_int8 = layout.dtype == DType::kInt8,
                                .head_dim = layout.head_dim,
                                .mask = mask,
                                .next = reinterpret_cast<const uint8_t*>(next),
                                .to = reinterpret_cast<uint16_t*>(to)});
}

PageElements ReadPage(const KvLayout& layout, const std::byte* page, uint64_t mask,
                      const std::byte* next_page, std::byte* memory) {
  const std::byte* keys = ReadKeys(layout, page, mask, next_page, memory);
  if (!IsQuantized(layout.dtype)) return {.keys = keys, .values = page + layout.v_offset()};
  std::byte* const values = memory + DequantizedPageBytes(layout) / 2;
  DequantizeSide(layout, PageSide::kValues, page, mask, next_page,
                 reinterpret_cast<BFloat16*>(values));
  return {.keys = keys, .values = values};
}

const std::byte* ReadKeys(const KvLayout& layout, const std::byte* page, uint64_t mask,
                          const std::byte* next_page, std::byte* memory) {
  if (!IsQuantized(layout.dtype)) return page;
  DequantizeSide(layout, PageSide::kKeys, page, mask, next_page,
                 reinterpret_cast<BFloat16*>(memory));
  return memory;
}

}  // namespace kvasir::kernels
