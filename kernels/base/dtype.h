// Element types of tensors and KV pages, and the conversions between them and float.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "absl/strings/string_view.h"

namespace kvasir::kernels {

// The numbers stand in stored KV (docs/page_format.md).
enum class DType : uint8_t {
  kFloat32 = 0,
  kBFloat16 = 1,
  kFloat16 = 2,
  kInt32 = 3,
  kFloat8E4M3 = 4,  // of KV only, with scales (paged/quantized_kv.h)
  kInt8 = 5,        // likewise
};

constexpr size_t DTypeSize(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kBFloat16:
    case DType::kFloat16:
      return 2;
    case DType::kFloat8E4M3:
    case DType::kInt8:
      return 1;
  }
  return 0;
}

constexpr absl::string_view DTypeName(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat16:
      return "float16";
    case DType::kInt32:
      return "int32";
    case DType::kFloat8E4M3:
      return "fp8_e4m3";
    case DType::kInt8:
      return "int8";
  }
  return "unknown";
}

// Whether `dtype` is one that every kernel accepts for activations and KV.
constexpr bool IsFloat32OrBFloat16(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kBFloat16;
}

// Whether KV of this dtype lies as codes of 8 bits with scales.
constexpr bool IsQuantized(DType dtype) {
  return dtype == DType::kFloat8E4M3 || dtype == DType::kInt8;
}
// Whether KV may have this dtype.
constexpr bool IsKvDType(DType dtype) { return IsFloat32OrBFloat16(dtype) || IsQuantized(dtype); }

// bfloat16 as storage: arithmetic happens in float.
struct BFloat16 {
  uint16_t bits = 0;

  constexpr BFloat16() = default;
  // Rounds to nearest even; NaN stays NaN.
  constexpr explicit BFloat16(float value) {
    uint32_t u = std::bit_cast<uint32_t>(value);
    if ((u & 0x7fffffffu) > 0x7f800000u) {
      bits = static_cast<uint16_t>((u >> 16) | 0x0040u);
    } else {
      u += 0x7fffu + ((u >> 16) & 1u);
      bits = static_cast<uint16_t>(u >> 16);
    }
  }
  constexpr explicit operator float() const {
    return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
  }
};
static_assert(sizeof(BFloat16) == 2);

}  // namespace kvasir::kernels
