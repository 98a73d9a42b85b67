// A unit (base/simd_units.h) that is a pair of bfloat16, for files compiled for AVX-512 with
// -mavx512bf16. Included after simd_avx512.h.
#pragma once

#include "kernels/simd/simd_avx512.h"

namespace kvasir::kernels {
namespace {

// vdpbf16ps adds both products to a float32; denormals count as zero.
struct PairUnit {
  static constexpr int64_t kElements = 2;
  static Vec MulAdd(Vec c, Vec a, Vec b) {
    return _mm512_dpbf16_ps(c, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
};

}  // namespace
}  // namespace kvasir::kernels
