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

// A token's scale, twice, as bfloat16.
struct CodeScale {
  uint32_t pair;

  __device__ explicit CodeScale(uint8_t scale) {
    const uint32_t bits = scale == kNanScale ? 0x7fc0u : uint32_t{scale} << 7;
    pair = bits << 16 | bits;
  }
};

// Decodes two neighbours of four codes: the first two or the second.
__device__ inline uint32_t DecodeInt8Pair(uint32_t four, bool second) {
  // As bfloat16: 128 + the low seven bits, less 128 or, for a negative code, 256.
  const uint32_t spread = __byte_perm(four, 0, second ? 0x4342 : 0x4140);
  const uint32_t low = (spread & 0x007f007fu) | 0x43004300u;
  const uint32_t less = (spread & 0x00800080u) | 0x43004300u;
  const __nv_bfloat162 pair = __hsub2(*reinterpret_cast<const __nv_bfloat162*>(&low),
                                      *reinterpret_cast<const __nv_bfloat162*>(&less));
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ inline uint32_t DecodeFloat8Pair(uint32_t four, bool second) {
  // The bits of a code are those of a bfloat16 whose exponent is 120 too small.
  constexpr uint32_t kTwoTo120 = 0x7b807b80u;
  const uint32_t spread = __byte_perm(four, 0, second ? 0x3424 : 0x1404);
  return MultiplyPairs((spread & 0x80008000u) | (spread & 0x7f007f00u) >> 4, kTwoTo120);
}

// Decodes four codes to bfloat16.
__device__ inline uint2 DecodeFour(DType dtype, uint32_t codes, const CodeScale& scale) {
  uint2 pairs = dtype == DType::kInt8
                    ? uint2{DecodeInt8Pair(codes, false), DecodeInt8Pair(codes, true)}
                    : uint2{DecodeFloat8Pair(codes, false), DecodeFloat8Pair(codes, true)};
  return {MultiplyPairs(pairs.x, scale.pair), MultiplyPairs(pairs.y, scale.pair)};
}

// Decodes eight codes to bfloat16.
__device__ inline uint4 DecodeEight(DType dtype, const uint2& codes, const CodeScale& scale) {
  const uint2 low = DecodeFour(dtype, codes.x, scale);
  const uint2 high = DecodeFour(dtype, codes.y, scale);
  return {low.x, low.y, high.x, high.y};
}
__device__ inline void DecodeSixteen(DType dtype, const uint4& codes, const CodeScale& scale,
                                     uint4 (&elements)[2]) {
  elements[0] = DecodeEight(dtype, {codes.x, codes.y}, scale);
  elements[1] = DecodeEight(dtype, {codes.z, codes.w}, scale);
}

// Decodes one code to bfloat16.
__device__ inline BFloat16 DecodedElement(DType dtype, std::byte code, std::byte scale) {
  const auto power = static_cast<uint8_t>(scale);
  const float factor = power == kNanScale ? NAN : PowerOfTwo(int{power} - kScaleBias);
  return BFloat16(DecodeElement(dtype, static_cast<uint8_t>(code)) * factor);
}

}  // namespace kvasir::kernels
