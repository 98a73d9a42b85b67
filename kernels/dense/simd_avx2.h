// Eight floats at a time, for files compiled with -mavx2 -mfma only: loads and stores of float32
// and bfloat16 (as uint16_t), whole or partial, and exp. Everything is in an unnamed namespace, so
// that no other file can be given this code by the linker.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <immintrin.h>

namespace kvasir::kernels {
namespace {

constexpr int64_t kSimdWidth = 8;

[[maybe_unused]] inline __m256 Load8(const float* p) { return _mm256_loadu_ps(p); }

[[maybe_unused]] inline __m256 Load8(const uint16_t* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

[[maybe_unused]] inline void Store8(float* p, __m256 v) { _mm256_storeu_ps(p, v); }

// The upper halves after rounding to nearest even; NaN stays NaN. As BFloat16(float).
[[maybe_unused]] inline __m256i RoundToBFloat16(__m256 v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet_nan = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
  const __m256 is_nan = _mm256_cmp_ps(v, v, _CMP_UNORD_Q);
  return _mm256_castps_si256(
      _mm256_blendv_ps(_mm256_castsi256_ps(rounded), _mm256_castsi256_ps(quiet_nan), is_nan));
}

[[maybe_unused]] inline void Store8(uint16_t* p, __m256 v) {
  const __m256i upper = _mm256_srli_epi32(RoundToBFloat16(v), 16);
  const __m256i packed = _mm256_packus_epi32(upper, upper);
  const __m256i ordered = _mm256_permute4x64_epi64(packed, 0b1000);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(ordered));
}

// v as it would be after a store and a load.
[[maybe_unused]] inline __m256 RoundTo(const float*, __m256 v) { return v; }
[[maybe_unused]] inline __m256 RoundTo(const uint16_t*, __m256 v) {
  return _mm256_castsi256_ps(
      _mm256_and_si256(RoundToBFloat16(v), _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}

// The first n of eight elements, n in [0, 8]; the others load as zero and are not stored.
template <typename T>
inline __m256 LoadN(const T* p, int64_t n) {
  if (n == kSimdWidth) return Load8(p);
  T padded[kSimdWidth] = {};
  std::memcpy(padded, p, static_cast<size_t>(n) * sizeof(T));
  return Load8(padded);
}

template <typename T>
inline void StoreN(T* p, __m256 v, int64_t n) {
  if (n == kSimdWidth) return Store8(p, v);
  T padded[kSimdWidth];
  Store8(padded, v);
  std::memcpy(p, padded, static_cast<size_t>(n) * sizeof(T));
}

// How many of the elements from i on are within [0, n), at most eight and at least none.
[[maybe_unused]] inline int64_t CountFrom(int64_t i, int64_t n) {
  const int64_t left = n - i;
  return left >= kSimdWidth ? kSimdWidth : (left > 0 ? left : 0);
}

// exp(x) within 2 units in the last place; below -88 that of -88 (6e-39), +inf above 88.8, NaN for
// NaN.
// x = n ln2 + r with |r| <= ln2 / 2, and exp(r) by its Taylor polynomial of degree 7, whose error
// there is below 6e-9.
[[maybe_unused]] inline __m256 Exp8(__m256 x) {
  // Operand order keeps NaN: min and max return the second operand when one is NaN.
  const __m256 in_range =
      _mm256_max_ps(_mm256_set1_ps(-88.0f), _mm256_min_ps(_mm256_set1_ps(89.0f), x));
  const __m256 n = _mm256_round_ps(_mm256_mul_ps(in_range, _mm256_set1_ps(1.44269504f)),
                                   _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), in_range);
  r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
  __m256 p = _mm256_set1_ps(1.0f / 5040);
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 720));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 120));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 24));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 6));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.5f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
  // 2^n in two factors, since n reaches 128 and -127.
  const __m256i exponent = _mm256_cvtps_epi32(n);
  const __m256i half = _mm256_srai_epi32(exponent, 1);
  const __m256i rest = _mm256_sub_epi32(exponent, half);
  const __m256i bias = _mm256_set1_epi32(127);
  const __m256 scale1 = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
  const __m256 scale2 = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23));
  return _mm256_mul_ps(_mm256_mul_ps(p, scale1), scale2);
}

}  // namespace
}  // namespace kvasir::kernels
