#include "kernels/dense/elementwise.h"

namespace kvasir::kernels {
namespace {

template <typename X, typename Y>
void AddRow(const AddRows& rows, int64_t row) {
  const X* x = static_cast<const X*>(rows.x) + row * rows.dim;
  Y* y = static_cast<Y*>(rows.y) + row * rows.dim;
  for (int64_t d = 0; d < rows.dim; ++d) {
    const Y rounded = Y(static_cast<float>(x[d]));
    y[d] = Y(static_cast<float>(y[d]) + static_cast<float>(rounded));
  }
}

template <typename X>
void RunRowsOf(const AddRows& rows, int64_t begin, int64_t end) {
  const auto run = rows.y_dtype == DType::kFloat32 ? AddRow<X, float> : AddRow<X, BFloat16>;
  for (int64_t row = begin; row < end; ++row) run(rows, row);
}

}  // namespace

void RunAddRows(const AddRows& rows, int64_t begin, int64_t end) {
  const bool wide = rows.x_dtype == DType::kFloat32;
  wide ? RunRowsOf<float>(rows, begin, end) : RunRowsOf<BFloat16>(rows, begin, end);
}

}  // namespace kvasir::kernels
