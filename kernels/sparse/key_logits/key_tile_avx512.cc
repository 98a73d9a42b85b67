// Compiled for AVX-512; see the warning in simd/simd_units.h. The vectors are included before the
// functions that use them.
// clang-format off
#include "kernels/simd/simd_avx512.h"
// clang-format on

namespace kvasir::kernels {
namespace {

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

}  // namespace
}  // namespace kvasir::kernels

#include "kernels/sparse/key_logits/key_tile_simd.h"

namespace kvasir::kernels {

const KeyTileFunctions kKeyTileAvx512 = kFunctions;

}  // namespace kvasir::kernels
