// Compiled for AVX2 and FMA; see the warning in elementwise.h. Products and sums are not fused, so
// that the bits are those of rope_cpu.cc.
#include "kernels/dense/elementwise.h"
#include "kernels/dense/simd_avx2.h"

namespace kvasir::kernels {
namespace {

template <typename T>
void RotateHead(T* x, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; i += kSimdWidth) {
    const int64_t n = CountFrom(i, half);
    const __m256 c = LoadN(cos + i, n);
    const __m256 s = LoadN(sin + i, n);
    const __m256 first = LoadN(x + i, n);
    const __m256 second = LoadN(x + i + half, n);
    StoreN(x + i, _mm256_sub_ps(_mm256_mul_ps(first, c), _mm256_mul_ps(second, s)), n);
    StoreN(x + i + half, _mm256_add_ps(_mm256_mul_ps(second, c), _mm256_mul_ps(first, s)), n);
  }
}

template <typename T>
void RotateToken(const RopeTokens& tokens, int64_t token) {
  const int64_t half = tokens.half_dim;
  for (int64_t head = 0; head < tokens.heads; ++head) {
    RotateHead(static_cast<T*>(tokens.x) + (token * tokens.heads + head) * 2 * half,
               tokens.cos + token * half, tokens.sin + token * half, half);
  }
}

}  // namespace

void RunRopeTokensAvx2(const RopeTokens& tokens, int64_t begin, int64_t end) {
  const auto run = tokens.dtype == DType::kFloat32 ? RotateToken<float> : RotateToken<uint16_t>;
  for (int64_t token = begin; token < end; ++token) run(tokens, token);
}

}  // namespace kvasir::kernels
