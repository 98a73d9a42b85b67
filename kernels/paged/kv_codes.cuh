// Decodes quantized KV (kv_codes.h) on the GPU, to the bits that the CPU decodes to.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cuda_bf16.h>

#include "kernels/paged/kv_codes.h"
#include "kernels/paged/paged_kv.h"

namespace kvasir::kernels {

__device__ inline uint32_t MultiplyPairs(uint32_t a, uint32_t b) {
  const __nv_bfloat162 product = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&a),
                                         *reinterpret_cast<const __nv_bfloat162*>(&b));
  return *reinterpret_cast<const uint32_t*>(&product);
}

// A token's scale: 2^(scale - 127), or NaN.
struct CodeScale {
  uint32_t bits;  // as bfloat16

  __device__ explicit CodeScale(uint8_t scale)
      : bits(scale == kNanScale ? 0x7fc0u : uint32_t{scale} << 7) {}
  __device__ float factor() const { return __uint_as_float(bits << 16); }
  __device__ uint4 Of(const uint4& eight) const {
    const uint32_t pair = bits << 16 | bits;
    return {MultiplyPairs(eight.x, pair), MultiplyPairs(eight.y, pair),
            MultiplyPairs(eight.z, pair), MultiplyPairs(eight.w, pair)};
  }
};

// Decodes two codes, one in each half of a word (int8: in its lower byte, fp8: in its upper one),
// without their scale, which makes them finite bfloat16 numbers whatever the codes are.
template <bool kIsInt8>
__device__ uint32_t DecodeSpread(uint32_t spread) {
  if constexpr (kIsInt8) {
    // 128 + the low seven bits, less 128 or, for a negative code, 256.
    const uint32_t low = (spread & 0x007f007fu) | 0x43004300u;
    const uint32_t less = (spread & 0x00800080u) | 0x43004300u;
    const __nv_bfloat162 pair = __hsub2(*reinterpret_cast<const __nv_bfloat162*>(&low),
                                        *reinterpret_cast<const __nv_bfloat162*>(&less));
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    // The bits of a code are those of a bfloat16 whose exponent is 120 too small.
    constexpr uint32_t kTwoTo120 = 0x7b807b80u;
    return MultiplyPairs((spread & 0x80008000u) | (spread >> 4 & 0x07f007f0u), kTwoTo120);
  }
}
// Decodes two neighbours of four codes, the first two or the second, without their scale.
template <bool kIsInt8>
__device__ uint32_t DecodePair(uint32_t four, bool second) {
  if constexpr (kIsInt8) {
    return DecodeSpread<true>(__byte_perm(four, 0, second ? 0x4342 : 0x4140));
  } else {
    return DecodeSpread<false>(__byte_perm(four, 0, second ? 0x3424 : 0x1404));
  }
}
// Decodes code `code` of each of two words, without their scale.
template <bool kIsInt8>
__device__ uint32_t DecodeAcross(uint32_t first, uint32_t second, int code) {
  const auto selector = static_cast<uint32_t>(code | (4 + code) << 8);
  return DecodeSpread<kIsInt8>(__byte_perm(first, second, kIsInt8 ? selector : selector << 4));
}
template <bool kIsInt8>
__device__ uint4 DecodeEight(const uint2& codes) {
  return {DecodePair<kIsInt8>(codes.x, false), DecodePair<kIsInt8>(codes.x, true),
          DecodePair<kIsInt8>(codes.y, false), DecodePair<kIsInt8>(codes.y, true)};
}

// Decodes one code to bfloat16.
__device__ inline BFloat16 DecodedElement(DType dtype, std::byte code, std::byte scale) {
  const auto power = static_cast<uint8_t>(scale);
  const float factor = power == kNanScale ? NAN : PowerOfTwo(int{power} - kScaleBias);
  return BFloat16(DecodeElement(dtype, static_cast<uint8_t>(code)) * factor);
}

}  // namespace kvasir::kernels
