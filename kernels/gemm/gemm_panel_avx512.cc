// Compiled for AVX-512; see the warning in gemm_panel.h. Of 32 registers 28 hold sums: tiles of 14
// rows and 32 columns, or fewer rows and more columns.
// clang-format off
#include "kernels/simd/simd_avx512.h"
namespace kvasir::kernels { namespace { constexpr int kSumVectors = 28; } }
#include "kernels/gemm/gemm_panel_simd.h"
// clang-format on

namespace kvasir::kernels {

PanelKernels Avx512PanelKernels() { return Kernels(); }

}  // namespace kvasir::kernels
