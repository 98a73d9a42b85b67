// Compiled for NEON; see the warning in simd_units.h. The vectors are included before the functions
// that use them.
// clang-format off
#include "kernels/simd/simd_neon.h"
#include "kernels/paged/dequantize_simd.h"
// clang-format on

namespace kvasir::kernels {

void DequantizeNeon(const DequantizeParams& params) { Dequantize(params); }

}  // namespace kvasir::kernels
