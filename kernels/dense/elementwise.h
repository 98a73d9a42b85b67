// Internal to this folder: the row loops of the element-wise ops, plain (x_cpu.cc, the reference)
// and over vectors (elementwise_neon.cc, elementwise_avx2.cc, elementwise_avx512.cc). They trust
// their callers in x.cc. All forms compute the same bits, except for the exponential in silu.
//
// Plain pointers only: files compiled for AVX must not instantiate inline functions of other
// headers, which the linker could then choose for machines without it.
#pragma once

#include <cstdint>

#include "kernels/base/dtype.h"

namespace kvasir::kernels {

struct NormRows {
  const void* x;       // [rows][dim]
  const void* weight;  // [dim]
  void* y;             // [rows][dim]
  DType dtype;         // of all three: float32 or bfloat16
  int64_t dim;
  float epsilon;
};
// Squares are summed in this many float lanes: element d in lane d mod 16, then lane by lane.
constexpr int64_t kNormLanes = 16;
void RunNormRows(const NormRows& rows, int64_t begin, int64_t end);
void RunNormRowsNeon(const NormRows& rows, int64_t begin, int64_t end);
void RunNormRowsAvx2(const NormRows& rows, int64_t begin, int64_t end);
void RunNormRowsAvx512(const NormRows& rows, int64_t begin, int64_t end);

struct RopeTokens {
  void* x;           // [tokens][heads][2 * half_dim]
  const float* cos;  // [tokens][half_dim]
  const float* sin;  // [tokens][half_dim]
  DType dtype;       // of x: float32 or bfloat16
  int64_t heads;
  int64_t half_dim;
};
void RunRopeTokens(const RopeTokens& tokens, int64_t begin, int64_t end);
void RunRopeTokensNeon(const RopeTokens& tokens, int64_t begin, int64_t end);
void RunRopeTokensAvx2(const RopeTokens& tokens, int64_t begin, int64_t end);
void RunRopeTokensAvx512(const RopeTokens& tokens, int64_t begin, int64_t end);

struct SiluMulRows {
  const void* gate_up;  // [rows][2 * dim]
  void* y;              // [rows][dim]
  DType dtype;          // of both: float32 or bfloat16
  int64_t dim;
};
void RunSiluMulRows(const SiluMulRows& rows, int64_t begin, int64_t end);
void RunSiluMulRowsNeon(const SiluMulRows& rows, int64_t begin, int64_t end);
void RunSiluMulRowsAvx2(const SiluMulRows& rows, int64_t begin, int64_t end);
void RunSiluMulRowsAvx512(const SiluMulRows& rows, int64_t begin, int64_t end);

struct AddRows {
  const void* x;  // [rows][dim]
  void* y;        // [rows][dim]
  DType x_dtype;  // float32 or bfloat16, as y_dtype
  DType y_dtype;
  int64_t dim;
};
void RunAddRows(const AddRows& rows, int64_t begin, int64_t end);
void RunAddRowsNeon(const AddRows& rows, int64_t begin, int64_t end);
void RunAddRowsAvx2(const AddRows& rows, int64_t begin, int64_t end);
void RunAddRowsAvx512(const AddRows& rows, int64_t begin, int64_t end);

}  // namespace kvasir::kernels
