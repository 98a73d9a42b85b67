// For Arm; see the warning in simd/simd_units.h. The vectors are included before the functions that
// use them.
// clang-format off
#include "kernels/simd/simd_neon.h"
// clang-format on

namespace kvasir::kernels {
namespace {

// Codes are below 16, so their bytes are the same signed and unsigned.
inline Vec MultiplyAddBytes(Vec codes, uint32_t quad) {
  const int8x16_t a = vreinterpretq_s8_f32(codes);
  const int8x16_t b = vreinterpretq_s8_u32(vdupq_n_u32(quad));
  const int16x8_t low = vmull_s8(vget_low_s8(a), vget_low_s8(b));
  const int16x8_t high = vmull_high_s8(a, b);
  return vreinterpretq_f32_s16(vpaddq_s16(low, high));
}
inline Vec AddShorts(Vec v) { return vreinterpretq_f32_s32(vpaddlq_s16(vreinterpretq_s16_f32(v))); }
inline Vec LoadHalf(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }

}  // namespace
}  // namespace kvasir::kernels

#include "kernels/sparse/key_logits/key_tile_simd.h"

namespace kvasir::kernels {

const KeyTileFunctions kKeyTileNeon = kFunctions;

}  // namespace kvasir::kernels
