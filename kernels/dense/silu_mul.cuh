// SiLU(gate) * up on the GPU, as SiluMul (silu_mul.h) rounds it: a step at a time to T. Compiled
// without fused multiply-add, so that its bytes equal the CPU's.
#pragma once

#include <cmath>
#include <cuda_runtime.h>

namespace kvasir::kernels {

template <typename T>
__device__ T SiluMulOf(T gate, T up) {
  const auto g = static_cast<float>(gate);
  const T silu = T(g / (1.0f + expf(-g)));
  return T(static_cast<float>(silu) * static_cast<float>(up));
}

// The same where gates are many and their divisions shall overlap: the compiler's division branches
// for operands that are very large or small, and no two of them overlap. This one has the bits of
// the compiler's, whose steps it takes, for gates that are usual.
class UsualSilu {
 public:
  __device__ explicit UsualSilu(float gate)
      : is_usual_(gate == 0 || (fabsf(gate) > 0x1p-60f && gate > -40.0f && gate < 0x1p60f)) {
    const float divisor = 1.0f + expf(-gate);
    float inverse = 0;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(divisor));
    inverse = fmaf(inverse, fmaf(-divisor, inverse, 1.0f), inverse);
    value_ = gate * inverse;
    value_ = fmaf(inverse, fmaf(-divisor, value_, gate), value_);
    value_ = fmaf(inverse, fmaf(-divisor, value_, gate), value_);
    if (gate == 0) value_ = gate;  // with its sign
  }
  __device__ bool is_usual() const { return is_usual_; }
  __device__ float value() const { return value_; }

 private:
  bool is_usual_;
  float value_;
};

}  // namespace kvasir::kernels
