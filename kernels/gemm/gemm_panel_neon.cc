// For Arm; see the warning in gemm_panel.h. Of 32 registers 24 hold sums: tiles of 12 rows and 8
// columns, or fewer rows and more columns.
// clang-format off
#include "kernels/simd/simd_neon.h"
namespace kvasir::kernels { namespace { constexpr int kSumVectors = 24; } }
#include "kernels/gemm/gemm_panel_simd.h"
// clang-format on

namespace kvasir::kernels {

PanelKernels NeonPanelKernels() { return Kernels(); }

}  // namespace kvasir::kernels
