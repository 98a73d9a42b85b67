// Compiled for AVX2; see the warning in simd/simd_units.h. The vectors are included before the
// functions that use them.
// clang-format off
#include "kernels/simd/simd_avx2.h"
// clang-format on

namespace kvasir::kernels {
namespace {

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

}  // namespace
}  // namespace kvasir::kernels

#include "kernels/sparse/key_logits/key_tile_simd.h"

namespace kvasir::kernels {

const KeyTileFunctions kKeyTileAvx2 = kFunctions;

}  // namespace kvasir::kernels
