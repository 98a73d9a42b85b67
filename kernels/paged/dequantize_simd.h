// DequantizeSide over vectors, written once for all widths (see simd/simd_units.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/paged/dequantize.h"
#include "kernels/simd/simd_units.h"

namespace kvasir::kernels {
namespace {

using IntVec __attribute__((vector_size(sizeof(Vec)))) = int32_t;
using ByteVec __attribute__((vector_size(kSimdWidth))) = uint8_t;

inline UintVec LoadCodes(const uint8_t* p) {
  ByteVec bytes;
  __builtin_memcpy(&bytes, p, sizeof(bytes));
  return __builtin_convertvector(bytes, UintVec);
}

inline Vec Int8Elements(UintVec codes) {
  const IntVec shifted = reinterpret_cast<IntVec>(codes << 24) >> 24;
  return FromInt32(reinterpret_cast<Vec>(shifted));
}

inline Vec Float8Elements(UintVec codes) {
  const UintVec magnitude = codes & 0x7fu;
  const UintVec normal = (magnitude << 20) + (120u << 23);
  // Below the least normal number codes are multiples of 2^-9.
  const UintVec small = Bits(FromInt32(FromBits(magnitude)) * Broadcast(0x1p-9f));
  const UintVec is_small = reinterpret_cast<UintVec>(magnitude < 8u);
  return FromBits((is_small & small) | (~is_small & normal) | (codes & 0x80u) << 24);
}

// 2^(scale - 127); NaN for 255.
inline Vec ScaleFactor(uint8_t scale) {
  const uint32_t bits = scale == 255 ? 0x7fc00000u : uint32_t{scale} << 23;
  float factor;
  __builtin_memcpy(&factor, &bits, 4);
  return Broadcast(factor);
}

template <bool kIsInt8>
inline void DequantizeToken(const uint8_t* codes, int64_t head_dim, Vec factor, uint16_t* to) {
  const auto elements = [&](const uint8_t* at) {
    const UintVec loaded = LoadCodes(at);
    return (kIsInt8 ? Int8Elements(loaded) : Float8Elements(loaded)) * factor;
  };
  int64_t i = 0;
  for (; i + kSimdWidth <= head_dim; i += kSimdWidth) Store(to + i, elements(codes + i));
  if (i == head_dim) return;
  uint8_t padded[static_cast<size_t>(kSimdWidth)] = {};
  for (int64_t j = i; j < head_dim; ++j) padded[j - i] = codes[j];
  StorePart(to + i, elements(padded), head_dim - i);
}

inline void Dequantize(const DequantizeParams& p) {
  const uint64_t mask = p.mask;
  for (int64_t token = 0; token < 64; ++token) {
    const int64_t row = token * p.head_dim;
    if (p.next != nullptr) {
      for (int64_t at = 0; at < p.head_dim; at += 64) {
        PrefetchNext(reinterpret_cast<const std::byte*>(p.next), row + at);
      }
    }
    if ((mask >> token & 1) == 0) continue;
    const Vec factor = ScaleFactor(p.scales[token]);
    if (p.is_int8) {
      DequantizeToken<true>(p.codes + row, p.head_dim, factor, p.to + row);
    } else {
      DequantizeToken<false>(p.codes + row, p.head_dim, factor, p.to + row);
    }
  }
}

}  // namespace
}  // namespace kvasir::kernels
