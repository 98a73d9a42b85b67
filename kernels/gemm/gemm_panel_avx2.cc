// Compiled for AVX2 and FMA; see the warning in gemm_panel.h. Of 16 registers 12 hold sums: tiles
// of 6 rows and 16 columns, or fewer rows and more columns.
// clang-format off
#include "kernels/simd/simd_avx2.h"
namespace kvasir::kernels { namespace { constexpr int kSumVectors = 12; } }
#include "kernels/gemm/gemm_panel_simd.h"
// clang-format on

namespace kvasir::kernels {

PanelKernels Avx2PanelKernels() { return Kernels(); }

}  // namespace kvasir::kernels
