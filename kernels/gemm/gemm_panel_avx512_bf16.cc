// Compiled for AVX-512 with BF16; see the warning in gemm_panel.h. The kernels of gemm_panel_simd.h
// over units of two bfloat16 neighbours in k: a unit has the size of a float, and one instruction
// adds both of its products.
// clang-format off
#include "kernels/simd/simd_avx512.h"
#include "kernels/simd/simd_avx512_bf16.h"
namespace kvasir::kernels { namespace { constexpr int kSumVectors = 28; } }
#include "kernels/gemm/gemm_panel_simd.h"
// clang-format on

namespace kvasir::kernels {
namespace {

struct Pair {
  float bits;  // never computed with
};

inline void LoadPanel(const Pair* p, Vec& first, Vec& second) {
  LoadPanel(&p->bits, first, second);
}
inline Vec MulAdd(const Pair*, Vec x, Vec w, Vec sum) { return PairUnit::MulAdd(sum, x, w); }

template <>
struct DecodedOf<Pair> {
  using Type = Pair;
};

}  // namespace

PanelKernels Avx512Bf16PanelKernels() {
  PanelKernels kernels = Kernels();
  kernels.few_rows = FewRowsOf<Pair>;
  kernels.many_rows = ManyRowsOf<Pair>;
  return kernels;
}

}  // namespace kvasir::kernels
