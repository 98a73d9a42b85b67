// Compiled for AVX2 and FMA; see the warning in elementwise.h. Products and sums are not fused, so
// that the bits are those of rms_norm_cpu.cc.
#include <cmath>

#include "kernels/dense/elementwise.h"
#include "kernels/dense/simd_avx2.h"

namespace kvasir::kernels {
namespace {

static_assert(kNormLanes == 2 * kSimdWidth);

template <typename T>
void AddRow(T* x, const T* add, int64_t dim) {
  for (int64_t d = 0; d < dim; d += kSimdWidth) {
    const int64_t n = CountFrom(d, dim);
    StoreN(x + d, _mm256_add_ps(LoadN(x + d, n), LoadN(add + d, n)), n);
  }
}

template <typename T>
float SumOfSquares(const T* x, int64_t dim) {
  __m256 low = _mm256_setzero_ps();
  __m256 high = _mm256_setzero_ps();
  for (int64_t d = 0; d < dim; d += kNormLanes) {
    const __m256 a = LoadN(x + d, CountFrom(d, dim));
    low = _mm256_add_ps(low, _mm256_mul_ps(a, a));
    if (d + kSimdWidth >= dim) break;
    const __m256 b = LoadN(x + d + kSimdWidth, CountFrom(d + kSimdWidth, dim));
    high = _mm256_add_ps(high, _mm256_mul_ps(b, b));
  }
  float lanes[kNormLanes];
  Store8(lanes, low);
  Store8(lanes + kSimdWidth, high);
  float sum = 0;
  for (float lane : lanes) sum += lane;
  return sum;
}

template <typename T>
void NormRow(const NormRows& rows, int64_t row) {
  T* x = static_cast<T*>(rows.x) + row * rows.dim;
  const T* weight = static_cast<const T*>(rows.weight);
  T* y = static_cast<T*>(rows.y) + row * rows.dim;
  if (rows.add != nullptr) AddRow(x, static_cast<const T*>(rows.add) + row * rows.dim, rows.dim);
  const float mean = SumOfSquares(x, rows.dim) / static_cast<float>(rows.dim);
  const __m256 scale = _mm256_set1_ps(1.0f / sqrtf(mean + rows.epsilon));
  for (int64_t d = 0; d < rows.dim; d += kSimdWidth) {
    const int64_t n = CountFrom(d, rows.dim);
    const __m256 normalized = RoundTo(x, _mm256_mul_ps(LoadN(x + d, n), scale));
    StoreN(y + d, _mm256_mul_ps(LoadN(weight + d, n), normalized), n);
  }
}

}  // namespace

void RunNormRowsAvx2(const NormRows& rows, int64_t begin, int64_t end) {
  const auto run = rows.dtype == DType::kFloat32 ? NormRow<float> : NormRow<uint16_t>;
  for (int64_t row = begin; row < end; ++row) run(rows, row);
}

}  // namespace kvasir::kernels
