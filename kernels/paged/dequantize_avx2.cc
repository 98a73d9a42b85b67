// Compiled for AVX2; see the warning in simd_units.h. The vectors are included before the functions
// that use them.
// clang-format off
#include "kernels/simd/simd_avx2.h"
#include "kernels/paged/dequantize_simd.h"
// clang-format on

namespace kvasir::kernels {

void DequantizeAvx2(const DequantizeParams& params) { Dequantize(params); }

}  // namespace kvasir::kernels
