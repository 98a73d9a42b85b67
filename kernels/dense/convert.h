// Copies of rows between float32 and bfloat16, rounding to nearest even. Internal to this folder.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/base/dtype.h"

namespace kvasir::kernels {

// Converts n elements. `from` and `to` are float32 or bfloat16. The memories must not overlap.
inline void ConvertElements(const void* source, DType from, void* target, DType to, int64_t n) {
  if (from == to) {
    std::memcpy(target, source, static_cast<size_t>(n) * DTypeSize(from));
  } else if (from == DType::kBFloat16) {
    const auto* in = static_cast<const BFloat16*>(source);
    auto* out = static_cast<float*>(target);
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<float>(in[i]);
  } else {
    const auto* in = static_cast<const float*>(source);
    auto* out = static_cast<BFloat16*>(target);
    for (int64_t i = 0; i < n; ++i) out[i] = BFloat16(in[i]);
  }
}

}  // namespace kvasir::kernels
