// Vectors of four floats on 64-bit Arm; the twin of simd_avx2.h, which has the comments.
#pragma once

#include <arm_neon.h>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace kvasir::kernels {
namespace {

using Vec = float32x4_t;
constexpr int64_t kSimdWidth = 4;
constexpr int kProductRows = 6;  // 24 of 32 registers are sums
constexpr int kProductVectors = 4;

inline Vec Broadcast(float value) { return vdupq_n_f32(value); }

inline Vec Load(const float* p) { return vld1q_f32(p); }
inline Vec Load(const uint16_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }

inline void LoadPairs(const uint16_t* p, Vec& even, Vec& odd) {
  const uint32x4_t bits = vreinterpretq_u32_u16(vld1q_u16(p));
  even = vreinterpretq_f32_u32(vshlq_n_u32(bits, 16));
  odd = vreinterpretq_f32_u32(vandq_u32(bits, vdupq_n_u32(0xffff0000u)));
}

inline uint32x4_t RoundBits(Vec v) {
  const uint32x4_t bits = vreinterpretq_u32_f32(v);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  const uint32x4_t quiet_nan = vorrq_u32(bits, vdupq_n_u32(0x00400000));
  return vbslq_u32(vceqq_f32(v, v), rounded, quiet_nan);
}

inline void Store(float* p, Vec v) { vst1q_f32(p, v); }
inline void Store(uint16_t* p, Vec v) { vst1_u16(p, vshrn_n_u32(RoundBits(v), 16)); }

template <typename T>
inline Vec LoadPart(const T* p, int64_t n) {
  T padded[kSimdWidth] = {};
  std::memcpy(padded, p, static_cast<size_t>(n) * sizeof(T));
  return Load(padded);
}
template <typename T>
inline void StorePart(T* p, Vec v, int64_t n) {
  T padded[kSimdWidth];
  Store(padded, v);
  std::memcpy(p, padded, static_cast<size_t>(n) * sizeof(T));
}

inline Vec RoundTo(const float*, Vec v) { return v; }
inline Vec RoundTo(const uint16_t*, Vec v) {
  return vreinterpretq_f32_u32(vandq_u32(RoundBits(v), vdupq_n_u32(0xffff0000u)));
}

inline Vec Negate(Vec v) { return vnegq_f32(v); }
inline Vec Clamp(Vec v, float low, float high) {
  return vmaxq_f32(vdupq_n_f32(low), vminq_f32(vdupq_n_f32(high), v));
}
inline Vec LargerOrSecond(Vec a, Vec b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
inline Vec RoundToInteger(Vec v) { return vrndnq_f32(v); }
inline Vec Fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }

inline Vec LoadAsInt16(const int8_t* p) { return vreinterpretq_f32_s16(vmovl_s8(vld1_s8(p))); }
inline Vec AddProductsOfPairs(Vec sum, Vec a, Vec b) {
  const int16x8_t x = vreinterpretq_s16_f32(a), y = vreinterpretq_s16_f32(b);
  const int32x4_t low = vmull_s16(vget_low_s16(x), vget_low_s16(y));
  const int32x4_t products = vpaddq_s32(low, vmull_high_s16(x, y));
  return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(sum), products));
}
inline Vec FromInt32(Vec v) { return vcvtq_f32_s32(vreinterpretq_s32_f32(v)); }
inline void StoreAsInt16(int16_t* p, Vec v) { vst1_s16(p, vqmovn_s32(vcvtnq_s32_f32(v))); }

inline float LargestElement(Vec v) { return vmaxvq_f32(v); }
inline Vec KeepWhere(uint32_t bits, Vec v, Vec otherwise) {
  constexpr uint32_t kBit[4] = {1, 2, 4, 8};
  return vbslq_f32(vtstq_u32(vdupq_n_u32(bits), vld1q_u32(kBit)), v, otherwise);
}
inline Vec ScaleByPowerOfTwo(Vec v, Vec n) {
  const int32x4_t exponent = vcvtq_s32_f32(n);
  const int32x4_t half = vshrq_n_s32(exponent, 1);
  const int32x4_t rest = vsubq_s32(exponent, half);
  const int32x4_t bias = vdupq_n_s32(127);
  return v * vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(half, bias), 23)) *
         vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(rest, bias), 23));
}

// Transposes 4 x 4 floats.
inline void TransposeVectors(Vec rows[4]) {
  const Vec t0 = vtrn1q_f32(rows[0], rows[1]);
  const Vec t1 = vtrn2q_f32(rows[0], rows[1]);
  const Vec t2 = vtrn1q_f32(rows[2], rows[3]);
  const Vec t3 = vtrn2q_f32(rows[2], rows[3]);
  rows[0] = vcombine_f32(vget_low_f32(t0), vget_low_f32(t2));
  rows[1] = vcombine_f32(vget_low_f32(t1), vget_low_f32(t3));
  rows[2] = vcombine_f32(vget_high_f32(t0), vget_high_f32(t2));
  rows[3] = vcombine_f32(vget_high_f32(t1), vget_high_f32(t3));
}

}  // namespace
}  // namespace kvasir::kernels
