// Compiled for AVX2 and FMA; see the warning in elementwise.h. The exponential of the plain loop
// takes most of its time: this one is several times as fast.
#include "kernels/dense/elementwise.h"
#include "kernels/dense/simd_avx2.h"

namespace kvasir::kernels {
namespace {

template <typename T>
void GateRow(const SiluMulRows& rows, int64_t row) {
  const T* gate = static_cast<const T*>(rows.gate_up) + row * 2 * rows.dim;
  const T* up = gate + rows.dim;
  T* y = static_cast<T*>(rows.y) + row * rows.dim;
  const __m256 one = _mm256_set1_ps(1.0f);
  for (int64_t d = 0; d < rows.dim; d += kSimdWidth) {
    const int64_t n = CountFrom(d, rows.dim);
    const __m256 g = LoadN(gate + d, n);
    const __m256 exp = Exp8(_mm256_xor_ps(g, _mm256_set1_ps(-0.0f)));
    const __m256 silu = RoundTo(gate, _mm256_div_ps(g, _mm256_add_ps(one, exp)));
    StoreN(y + d, _mm256_mul_ps(silu, LoadN(up + d, n)), n);
  }
}

}  // namespace

void RunSiluMulRowsAvx2(const SiluMulRows& rows, int64_t begin, int64_t end) {
  const auto run = rows.dtype == DType::kFloat32 ? GateRow<float> : GateRow<uint16_t>;
  for (int64_t row = begin; row < end; ++row) run(rows, row);
}

}  // namespace kvasir::kernels
