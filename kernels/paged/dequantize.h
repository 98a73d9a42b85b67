// The arithmetic of DequantizeSide (quantized_kv.h), in its own header so that vector code and the
// plain reference can be compared. All forms give the same bits: decoding does not round.
//
// This header is included by files compiled with instructions that the machine may lack (see
// simd/simd_units.h), so it holds plain data only. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvasir::kernels {

struct DequantizeParams {
  const uint8_t* codes = nullptr;   // [64, head_dim]
  const uint8_t* scales = nullptr;  // [64]
  bool is_int8 = false;             // else fp8_e4m3
  int64_t head_dim = 0;
  uint64_t mask = 0;              // wanted tokens
  const uint8_t* next = nullptr;  // like `codes`, read next; a prefetch hint
  uint16_t* to = nullptr;         // [64, head_dim] bfloat16
};

using DequantizeFn = void(const DequantizeParams& params);

DequantizeFn DequantizePlain;
DequantizeFn DequantizeNeon;
DequantizeFn DequantizeAvx2;
DequantizeFn DequantizeAvx512;

}  // namespace kvasir::kernels
