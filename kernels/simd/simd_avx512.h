// Vectors of sixteen floats, only for files compiled with -mavx512f -mavx512bw -mavx512dq
// -mavx512vl. The twin of simd_avx2.h, which has the comments.
#pragma once

#include <cstdint>
#include <immintrin.h>

namespace kvasir::kernels {
namespace {

using Vec = __m512;
constexpr int64_t kSimdWidth = 16;
constexpr int kProductRows = 6;  // 24 of 32 registers are sums
constexpr int kProductVectors = 4;

inline Vec Broadcast(float value) { return _mm512_set1_ps(value); }

inline Vec FromBFloat16(__m256i bits) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
inline Vec Load(const float* p) { return _mm512_loadu_ps(p); }
inline Vec Load(const uint16_t* p) {
  return FromBFloat16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

inline void LoadPairs(const uint16_t* p, Vec& even, Vec& odd) {
  const __m512i bits = _mm512_loadu_si512(p);
  even = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
  odd =
      _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

// Avoids the conversion instruction of AVX512_BF16, which flushes denormals to zero.
inline __m512i RoundBits(Vec v) {
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  return _mm512_mask_or_epi32(rounded, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), bits,
                              _mm512_set1_epi32(0x00400000));
}
inline __m256i ToBFloat16(Vec v) {
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(RoundBits(v), 16));
}

inline void Store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
inline void Store(uint16_t* p, Vec v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), ToBFloat16(v));
}

inline __mmask16 FirstN(int64_t n) { return static_cast<__mmask16>((1u << n) - 1); }
inline Vec LoadPart(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(FirstN(n), p); }
inline Vec LoadPart(const uint16_t* p, int64_t n) {
  return FromBFloat16(_mm256_maskz_loadu_epi16(FirstN(n), p));
}
inline void StorePart(float* p, Vec v, int64_t n) { _mm512_mask_storeu_ps(p, FirstN(n), v); }
inline void StorePart(uint16_t* p, Vec v, int64_t n) {
  _mm256_mask_storeu_epi16(p, FirstN(n), ToBFloat16(v));
}

inline Vec RoundTo(const float*, Vec v) { return v; }
inline Vec RoundTo(const uint16_t*, Vec v) {
  return _mm512_castsi512_ps(
      _mm512_and_si512(RoundBits(v), _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

inline Vec Negate(Vec v) { return _mm512_xor_ps(v, _mm512_set1_ps(-0.0f)); }
inline Vec Clamp(Vec v, float low, float high) {
  return _mm512_max_ps(_mm512_set1_ps(low), _mm512_min_ps(_mm512_set1_ps(high), v));
}
inline Vec LargerOrSecond(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec RoundToInteger(Vec v) {
  return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline Vec Fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }

inline Vec LoadAsInt16(const int8_t* p) {
  const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_cvtepi8_epi16(bytes));
}
inline Vec AddProductsOfPairs(Vec sum, Vec a, Vec b) {
  const __m512i products = _mm512_madd_epi16(_mm512_castps_si512(a), _mm512_castps_si512(b));
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(sum), products));
}
inline Vec FromInt32(Vec v) { return _mm512_cvtepi32_ps(_mm512_castps_si512(v)); }
inline void StoreAsInt16(int16_t* p, Vec v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(v)));
}

inline float LargestElement(Vec v) { return _mm512_reduce_max_ps(v); }
inline Vec KeepWhere(uint32_t bits, Vec v, Vec otherwise) {
  return _mm512_mask_mov_ps(otherwise, static_cast<__mmask16>(bits), v);
}
inline Vec ScaleByPowerOfTwo(Vec v, Vec n) { return _mm512_scalef_ps(v, n); }

// Transposes 16 x 16 floats.
inline void TransposeVectors(Vec v[16]) {
  __m512i rows[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) rows[i] = _mm512_castps_si512(v[i]);
  __m512i t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
  }
  // Now in groups of four rows. Each 128-bit lane is transposed as 64-bit pairs.
#pragma GCC unroll 16
  for (int i = 0; i < 4; ++i) {
    rows[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    rows[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    rows[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    rows[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  // rows[4 i + j], 128-bit lane l: column 4 l + j of rows 4 i .. 4 i + 3.
#pragma GCC unroll 16
  for (int j = 0; j < 4; ++j) {
    t[j] = _mm512_shuffle_i32x4(rows[j], rows[4 + j], 0x88);           // lanes 0, 2 of i = 0, 1
    t[4 + j] = _mm512_shuffle_i32x4(rows[j], rows[4 + j], 0xdd);       // lanes 1, 3
    t[8 + j] = _mm512_shuffle_i32x4(rows[8 + j], rows[12 + j], 0x88);  // the same for i = 2, 3
    t[12 + j] = _mm512_shuffle_i32x4(rows[8 + j], rows[12 + j], 0xdd);
  }
#pragma GCC unroll 16
  for (int j = 0; j < 4; ++j) {
    rows[j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0x88);
    rows[4 + j] = _mm512_shuffle_i32x4(t[4 + j], t[12 + j], 0x88);
    rows[8 + j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0xdd);
    rows[12 + j] = _mm512_shuffle_i32x4(t[4 + j], t[12 + j], 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) v[i] = _mm512_castsi512_ps(rows[i]);
}

}  // namespace
}  // namespace kvasir::kernels
