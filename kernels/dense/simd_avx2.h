// Vectors of eight floats, for files compiled with -mavx2 -mfma only; simd_avx512.h is its twin.
// bfloat16 in memory is uint16_t. Arithmetic is by the compiler's operators on Vec. Everything is
// in an unnamed namespace, so that the linker cannot give this code to files of other machines.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <immintrin.h>

namespace kvasir::kernels {
namespace {

using Vec = __m256;
constexpr int64_t kSimdWidth = 8;

inline Vec Broadcast(float value) { return _mm256_set1_ps(value); }

inline Vec Load(const float* p) { return _mm256_loadu_ps(p); }
inline Vec Load(const uint16_t* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

// Bits whose upper halves are v rounded to nearest even; NaN stays NaN. As BFloat16(float).
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

// The first n of the elements, n in [0, kSimdWidth]; the others load as zero and are not stored.
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

// v as it would be after a Store and a Load.
inline Vec RoundTo(const float*, Vec v) { return v; }
inline Vec RoundTo(const uint16_t*, Vec v) {
  return _mm256_castsi256_ps(
      _mm256_and_si256(RoundBits(v), _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}

inline Vec Negate(Vec v) { return _mm256_xor_ps(v, _mm256_set1_ps(-0.0f)); }
// NaN in v stays: these instructions return the second operand when one is NaN.
inline Vec Clamp(Vec v, float low, float high) {
  return _mm256_max_ps(_mm256_set1_ps(low), _mm256_min_ps(_mm256_set1_ps(high), v));
}
// The larger of the two; the second where one is NaN.
inline Vec LargerOrSecond(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec RoundToInteger(Vec v) {
  return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline Vec Fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
// v * 2^n for whole n in [-128, 129], in two factors since 2^129 is not a float.
inline Vec ScaleByPowerOfTwo(Vec v, Vec n) {
  const __m256i exponent = _mm256_cvtps_epi32(n);
  const __m256i half = _mm256_srai_epi32(exponent, 1);
  const __m256i rest = _mm256_sub_epi32(exponent, half);
  const __m256i bias = _mm256_set1_epi32(127);
  return v * _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23)) *
         _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23));
}

}  // namespace
}  // namespace kvasir::kernels
