// Register-blocked products for files compiled for AVX-512, over units of four bytes: one float, or
// a pair of bfloat16 neighbours. Everything has internal linkage, and includes are few on purpose:
// a function that the linker could share with the rest of the program would carry AVX-512 into
// code that runs everywhere.
//
//   C[row][64] += A[row][unit] . B[unit][64]      A: rows of units; B: units of 64 columns
//
// Up to 6 rows x 4 vectors of 16 columns stay in registers. Each element of C is one sequential
// chain over the units: the order of sums does not depend on the number of rows. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <immintrin.h>

namespace kvasir::kernels {
namespace {

constexpr int64_t kVectorLanes = 16;
constexpr int kMaxTileRows = 6;
constexpr int kColumnVectors = 4;
constexpr int64_t kColumns = kColumnVectors * kVectorLanes;

// A unit is one float.
struct FloatUnit {
  static constexpr int64_t kElements = 1;
  static __m512 MulAdd(__m512 c, __m512i a, __m512i b) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), c);
  }
};

#ifdef __AVX512BF16__
// A unit is a pair of bfloat16. vdpbf16ps adds both products to a float32, denormals count as zero.
struct PairUnit {
  static constexpr int64_t kElements = 2;
  static __m512 MulAdd(__m512 c, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(c, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
};
#endif

// Bfloat16 pairs become floats by shifting: the first of a pair is the low half.
inline __m512i FirstOfPairs(__m512i pairs) { return _mm512_slli_epi32(pairs, 16); }
inline __m512i SecondOfPairs(__m512i pairs) {
  return _mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u)));
}

// Rows and columns of a 16 x 16 block of four-byte units change places.
inline void Transpose16(__m512i rows[16]) {
  __m512i t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
  }
  // Now in groups of four rows, each 128-bit lane to be transposed as 64-bit pairs.
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
    t[8 + j] = _mm512_shuffle_i32x4(rows[8 + j], rows[12 + j], 0x88);  // likewise of i = 2, 3
    t[12 + j] = _mm512_shuffle_i32x4(rows[8 + j], rows[12 + j], 0xdd);
  }
#pragma GCC unroll 16
  for (int j = 0; j < 4; ++j) {
    rows[j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0x88);
    rows[4 + j] = _mm512_shuffle_i32x4(t[4 + j], t[12 + j], 0x88);
    rows[8 + j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0xdd);
    rows[12 + j] = _mm512_shuffle_i32x4(t[4 + j], t[12 + j], 0xdd);
  }
}

template <int kRows>
using Accumulators = __m512[static_cast<size_t>(kRows)][kColumnVectors];

inline __m512i BroadcastUnit(const std::byte* unit) {
  int32_t bits;
  __builtin_memcpy(&bits, unit, 4);
  return _mm512_set1_epi32(bits);
}

inline void LoadColumns(const std::byte* from, __m512i tile[kColumnVectors]) {
#pragma GCC unroll 4
  for (int j = 0; j < kColumnVectors; ++j) tile[j] = _mm512_loadu_si512(from + j * 64);
}

template <int kRows>
inline void ClearAccumulators(Accumulators<kRows>& c) {
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < kColumnVectors; ++j) c[r][j] = _mm512_setzero_ps();
  }
}

// C[row][4 vectors] += A[row][unit] . B[unit][4 vectors]; load(unit, tile) fetches a line of B.
template <typename Unit, int kRows, typename Load>
inline void Multiply(const std::byte* a, int64_t a_row_bytes, int64_t num_units, const Load& load,
                     Accumulators<kRows>& c) {
  for (int64_t u = 0; u < num_units; ++u) {
    __m512i tile[kColumnVectors];
    load(u, tile);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      const __m512i element = BroadcastUnit(a + r * a_row_bytes + u * 4);
#pragma GCC unroll 4
      for (int j = 0; j < kColumnVectors; ++j) c[r][j] = Unit::MulAdd(c[r][j], element, tile[j]);
    }
  }
}

}  // namespace
}  // namespace kvasir::kernels
