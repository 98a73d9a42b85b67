// Compiled for AVX2; see the warning in base/avx512_tile.h. The vectors come before the functions
// over them.
// clang-format off
#include "kernels/dense/simd_avx2.h"
// clang-format on

namespace kvasir::kernels {
namespace {

// A product fills 12 of 16 registers.
constexpr int kProductRows = 6;
constexpr int kProductVectors = 2;

inline Vec MultiplyAddBytes(Vec codes, uint32_t quad) {
  return _mm256_castsi256_ps(
      _mm256_maddubs_epi16(_mm256_castps_si256(codes), _mm256_set1_epi32(static_cast<int>(quad))));
}
inline Vec AddShorts(Vec v) {
  return _mm256_castsi256_ps(_mm256_madd_epi16(_mm256_castps_si256(v), _mm256_set1_epi16(1)));
}
inline Vec LoadHalf(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

// Rows and columns of a block of 8 x 8 floats change places.
inline void TransposeVectors(Vec rows[8]) {
  Vec t[8];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_ps(rows[2 * i], rows[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_ps(rows[2 * i], rows[2 * i + 1]);
  }
  // Each 128-bit half is a block of 4 x 4 of its own.
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

#include "kernels/sparse/key_tile_simd.h"

namespace kvasir::kernels {

const KeyTileFunctions kKeyTileAvx2 = kFunctions;

}  // namespace kvasir::kernels
