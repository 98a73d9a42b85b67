#include "kernels/dense/elementwise.h"

namespace kvasir::kernels {
namespace {

template <typename T>
void RotateToken(const RopeTokens& tokens, int64_t token) {
  const int64_t half = tokens.half_dim;
  const float* cos = tokens.cos + token * half;
  const float* sin = tokens.sin + token * half;
  for (int64_t head = 0; head < tokens.heads; ++head) {
    T* x = static_cast<T*>(tokens.x) + (token * tokens.heads + head) * 2 * half;
    for (int64_t i = 0; i < half; ++i) {
      const auto first = static_cast<float>(x[i]);
      const auto second = static_cast<float>(x[i + half]);
      x[i] = T(first * cos[i] - second * sin[i]);
      x[i + half] = T(second * cos[i] + first * sin[i]);
    }
  }
}

}  // namespace

void RunRopeTokens(const RopeTokens& tokens, int64_t begin, int64_t end) {
  const auto run = tokens.dtype == DType::kFloat32 ? RotateToken<float> : RotateToken<BFloat16>;
  for (int64_t token = begin; token < end; ++token) run(tokens, token);
}

}  // namespace kvasir::kernels
