#include <cmath>

#include "kernels/dense/elementwise.h"

namespace kvasir::kernels {
namespace {

template <typename T>
void NormRow(const NormRows& rows, int64_t row) {
  const T* x = static_cast<const T*>(rows.x) + row * rows.dim;
  const T* weight = static_cast<const T*>(rows.weight);
  T* y = static_cast<T*>(rows.y) + row * rows.dim;
  float lanes[kNormLanes] = {};
  for (int64_t d = 0; d < rows.dim; ++d) {
    const auto value = static_cast<float>(x[d]);
    lanes[d % kNormLanes] += value * value;
  }
  float sum = 0;
  for (float lane : lanes) sum += lane;
  const float scale = 1.0f / std::sqrt(sum / static_cast<float>(rows.dim) + rows.epsilon);
  for (int64_t d = 0; d < rows.dim; ++d) {
    const T normalized = T(static_cast<float>(x[d]) * scale);
    y[d] = T(static_cast<float>(weight[d]) * static_cast<float>(normalized));
  }
}

}  // namespace

void RunNormRows(const NormRows& rows, int64_t begin, int64_t end) {
  const auto run = rows.dtype == DType::kFloat32 ? NormRow<float> : NormRow<BFloat16>;
  for (int64_t row = begin; row < end; ++row) run(rows, row);
}

}  // namespace kvasir::kernels
