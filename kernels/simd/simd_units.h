// Register-blocked products over units of four bytes: a float, or a pair of bfloat16 neighbours.
// For files that are compiled for one instruction set and have included its simd_*.h before.
//
//   C[row][column] += A[row][unit] . B[unit][column]      A: rows of units; B: units of columns
//
// Up to kProductRows rows x kProductVectors vectors of columns stay in registers. Each element of C
// is one sequential chain over the units: the order of sums depends neither on the number of rows
// nor on the width of a vector.
//
// Everything has internal linkage, and includes are few on purpose: a function that the linker
// could share with the rest of the program would carry instructions into code that runs everywhere.
// Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvasir::kernels {
namespace {

using UintVec __attribute__((vector_size(sizeof(Vec)))) = uint32_t;

constexpr int64_t kVectorBytes = sizeof(Vec);

inline UintVec Bits(Vec v) { return reinterpret_cast<UintVec>(v); }
inline Vec FromBits(UintVec bits) { return reinterpret_cast<Vec>(bits); }

// Units as they lie in memory, of either type.
inline Vec LoadUnits(const std::byte* p) { return Load(reinterpret_cast<const float*>(p)); }
inline void StoreUnits(std::byte* p, Vec v) { Store(reinterpret_cast<float*>(p), v); }
inline Vec BroadcastUnit(const std::byte* p) {
  float unit;
  __builtin_memcpy(&unit, p, 4);
  return Broadcast(unit);
}

// Prefetches the memory at `offset` of `next`, or nothing when `next` is null. It goes to the
// second-level cache: a page of K and V fills the first level, whose few miss buffers would also
// limit the number of loads under way.
inline void PrefetchNext(const std::byte* next, int64_t offset) {
  constexpr int kForReading = 0, kSecondLevel = 2;
  if (next != nullptr) __builtin_prefetch(next + offset, kForReading, kSecondLevel);
}

// Bfloat16 pairs become floats by shifting: the first of a pair is the low half.
inline Vec FirstOfPairs(Vec pairs) { return FromBits(Bits(pairs) << 16); }
inline Vec SecondOfPairs(Vec pairs) { return FromBits(Bits(pairs) & 0xffff0000u); }

// A unit is one float.
struct FloatUnit {
  static constexpr int64_t kElements = 1;
  static Vec MulAdd(Vec c, Vec a, Vec b) { return Fma(a, b, c); }
};

template <int kRows, int kVectors>
using Sums = Vec[static_cast<size_t>(kRows)][static_cast<size_t>(kVectors)];

template <int kRows, int kVectors>
inline void Clear(Sums<kRows, kVectors>& c) {
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) c[r][j] = Broadcast(0);
  }
}

// C[row][kVectors vectors] += A[row][unit] . B[unit][kVectors vectors], for rows of A that lie
// a_row_bytes apart; load(unit, line) fetches a line of B.
template <typename Unit, int kRows, int kVectors, typename LoadLine>
inline void AddProduct(const std::byte* a, int64_t a_row_bytes, int64_t num_units,
                       const LoadLine& load, Sums<kRows, kVectors>& c) {
  for (int64_t u = 0; u < num_units; ++u) {
    Vec line[static_cast<size_t>(kVectors)];
    load(u, line);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      const Vec element = BroadcastUnit(a + r * a_row_bytes + u * 4);
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) c[r][j] = Unit::MulAdd(c[r][j], element, line[j]);
    }
  }
}

}  // namespace
}  // namespace kvasir::kernels
