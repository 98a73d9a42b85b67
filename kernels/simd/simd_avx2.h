// Vectors of eight floats, only for files compiled with -mavx2 -mfma; simd_avx512.h is its twin.
// bfloat16 in memory is uint16_t. Arithmetic uses the compiler's operators on Vec. Everything is in
// an unnamed namespace, so that the linker cannot give this code to files for other machines.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <immintrin.h>

namespace kvasir::kernels {
namespace {

using Vec = __m256;
constexpr int64_t kSimdWidth = 8;
// Size of a product that stays in registers: 12 of 16 registers are sums.
constexpr int kProductRows = 6;
constexpr int kProductVectors = 2;

inline Vec Broadcast(float value) { return _mm256_set1_ps(value); }

inline Vec Load(const float* p) { return _mm256_loadu_ps(p); }
inline Vec Load(const uint16_t* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

// Loads 2 kSimdWidth bfloat16: those at even places to `even`, the others to `odd`.
inline void LoadPairs(const uint16_t* p, Vec& even, Vec& odd) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  even = _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
  odd =
      _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}

// Returns bits whose upper halves are v rounded to nearest even, as BFloat16(float). NaN stays NaN.
inline __m256i RoundBits(Vec v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet_nan = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
  return _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(rounded),
                                              _mm256_castsi256_ps(quiet_nan),
                                              _mm256_cmp_ps(v, v, _CMP_UNORD_Q)));
}

inline void Store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
inline void Store(uint16_t* p, Vec v) {
  const __m256i upper = _mm256_srli_epi32(RoundBits(v), 16);
  const __m256i ordered = _mm256_permute4x64_epi64(_mm256_packus_epi32(upper, upper), 0b1000);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(ordered));
}

// Loads the first n elements, n in [0, kSimdWidth], and zeros for the others, which are not stored.
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

// Returns v as it is after a Store and a Load.
inline Vec RoundTo(const float*, Vec v) { return v; }
inline Vec RoundTo(const uint16_t*, Vec v) {
  return _mm256_castsi256_ps(
      _mm256_and_si256(RoundBits(v), _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}

inline Vec Negate(Vec v) { return _mm256_xor_ps(v, _mm256_set1_ps(-0.0f)); }
// Keeps NaN in v: these instructions return the second operand when one is NaN.
inline Vec Clamp(Vec v, float low, float high) {
  return _mm256_max_ps(_mm256_set1_ps(low), _mm256_min_ps(_mm256_set1_ps(high), v));
}
// Returns the larger of the two, and the second where either is NaN.
inline Vec LargerOrSecond(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec RoundToInteger(Vec v) {
  return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline Vec Fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
// Returns the largest element, or any value if one is NaN.
inline float LargestElement(Vec v) {
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
// Returns element i of `v` where bit i is set, and of `otherwise` elsewhere.
inline Vec KeepWhere(uint32_t bits, Vec v, Vec otherwise) {
  const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i set = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), bit);
  return _mm256_blendv_ps(otherwise, v, _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, bit)));
}
// Returns v * 2^n for whole n in [-250, 250], in two factors since 2^129 is not a float.
inline Vec ScaleByPowerOfTwo(Vec v, Vec n) {
  const __m256i exponent = _mm256_cvtps_epi32(n);
  const __m256i half = _mm256_srai_epi32(exponent, 1);
  const __m256i rest = _mm256_sub_epi32(exponent, half);
  const __m256i bias = _mm256_set1_epi32(127);
  return v * _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23)) *
         _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23));
}

// Integers in the bits of a Vec: kSimdWidth int32, or twice as many int16 in pairs.
// Loads 2 kSimdWidth int8 as int16.
inline Vec LoadAsInt16(const int8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_cvtepi8_epi16(bytes));
}
// Returns sum + a[0] * b[0] + a[1] * b[1] of each pair, in int32.
inline Vec AddProductsOfPairs(Vec sum, Vec a, Vec b) {
  const __m256i products = _mm256_madd_epi16(_mm256_castps_si256(a), _mm256_castps_si256(b));
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(sum), products));
}
inline Vec FromInt32(Vec v) { return _mm256_cvtepi32_ps(_mm256_castps_si256(v)); }
// Stores floats rounded to int16, nearest even, the largest instead of what is larger.
inline void StoreAsInt16(int16_t* p, Vec v) {
  const __m256i rounded = _mm256_cvtps_epi32(v);
  const __m256i ordered = _mm256_permute4x64_epi64(_mm256_packs_epi32(rounded, rounded), 0b1000);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(ordered));
}

// Transposes 8 x 8 floats.
inline void TransposeVectors(Vec rows[8]) {
  Vec t[8];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_ps(rows[2 * i], rows[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_ps(rows[2 * i], rows[2 * i + 1]);
  }
  // Each 128-bit half is a separate 4 x 4 transpose.
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    rows[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
    rows[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
    rows[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
    rows[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const Vec upper = rows[i], lower = rows[i + 4];
    rows[i] = _mm256_permute2f128_ps(upper, lower, 0x20);
    rows[i + 4] = _mm256_permute2f128_ps(upper, lower, 0x31);
  }
}

}  // namespace
}  // namespace kvasir::kernels
