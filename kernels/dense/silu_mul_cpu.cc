#include <cmath>

#include "kernels/dense/elementwise.h"

namespace kvasir::kernels {
namespace {

template <typename T>
void GateRow(const SiluMulRows& rows, int64_t row) {
  const T* gate = static_cast<const T*>(rows.gate_up) + row * 2 * rows.dim;
  const T* up = gate + rows.dim;
  T* y = static_cast<T*>(rows.y) + row * rows.dim;
  for (int64_t d = 0; d < rows.dim; ++d) {
    const auto g = static_cast<float>(gate[d]);
    const T silu = T(g / (1.0f + std::exp(-g)));
    y[d] = T(static_cast<float>(silu) * static_cast<float>(up[d]));
  }
}

}  // namespace

void RunSiluMulRows(const SiluMulRows& rows, int64_t begin, int64_t end) {
  const auto run = rows.dtype == DType::kFloat32 ? GateRow<float> : GateRow<BFloat16>;
  for (int64_t row = begin; row < end; ++row) run(rows, row);
}

}  // namespace kvasir::kernels
