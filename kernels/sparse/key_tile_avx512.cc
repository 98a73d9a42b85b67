// Compiled for AVX-512; see the warning in base/avx512_tile.h. The vectors come before the
// functions over them.
// clang-format off
#include "kernels/base/avx512_tile.h"
#include "kernels/dense/simd_avx512.h"
// clang-format on

namespace kvasir::kernels {
namespace {

// A product fills 24 of 32 registers.
constexpr int kProductRows = 6;
constexpr int kProductVectors = 4;

inline Vec MultiplyAddBytes(Vec codes, uint32_t quad) {
  return _mm512_castsi512_ps(
      _mm512_maddubs_epi16(_mm512_castps_si512(codes), _mm512_set1_epi32(static_cast<int>(quad))));
}
inline Vec AddShorts(Vec v) {
  return _mm512_castsi512_ps(_mm512_madd_epi16(_mm512_castps_si512(v), _mm512_set1_epi16(1)));
}
inline Vec LoadHalf(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

inline void TransposeVectors(Vec rows[16]) {
  __m512i units[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) units[i] = _mm512_castps_si512(rows[i]);
  Transpose16(units);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) rows[i] = _mm512_castsi512_ps(units[i]);
}

}  // namespace
}  // namespace kvasir::kernels

#include "kernels/sparse/key_tile_simd.h"

namespace kvasir::kernels {

const KeyTileFunctions kKeyTileAvx512 = kFunctions;

}  // namespace kvasir::kernels
