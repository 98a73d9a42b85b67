// Compiled for AVX-512; see the warning in elementwise.h. The vectors are included before the loops
// that use them.
// clang-format off
#include "kernels/simd/simd_avx512.h"
#include "kernels/dense/elementwise_simd.h"
// clang-format on

namespace kvasir::kernels {

void RunNormRowsAvx512(const NormRows& rows, int64_t begin, int64_t end) {
  RunRows(NormRow<float>, NormRow<uint16_t>, rows, begin, end);
}

void RunRopeTokensAvx512(const RopeTokens& tokens, int64_t begin, int64_t end) {
  RunRows(RotateToken<float>, RotateToken<uint16_t>, tokens, begin, end);
}

void RunSiluMulRowsAvx512(const SiluMulRows& rows, int64_t begin, int64_t end) {
  RunRows(GateRow<float>, GateRow<uint16_t>, rows, begin, end);
}

void RunAddRowsAvx512(const AddRows& rows, int64_t begin, int64_t end) {
  RunAddRowsOfAny(rows, begin, end);
}

}  // namespace kvasir::kernels
