// Internal to gemm: the kernel behind the panel engine, plain and for AVX2.
//
// Weights are float32 in panels of 16 columns: panel p holds w[16 p + j, k] at [p][k][j], zeros
// beyond the last column. Every element of y is one chain of additions over k = 0 .. K-1 followed
// by the bias, so it does not depend on the rows beside it; the AVX2 kernel fuses each product with
// its addition, the portable one rounds both.
//
// Plain pointers only: gemm_avx2.cc must not instantiate inline functions of other headers, which
// the linker could then choose for machines without AVX2.
#pragma once

#include <cstdint>

namespace kvasir::kernels {

constexpr int64_t kPanelColumns = 16;

struct PanelTile {
  const float* x;       // [rows, k]
  int64_t rows;         // > 0
  int64_t k;            // > 0
  const float* panels;  // [ceil(width / 16)][k][16]
  const float* bias;    // [width], or null
  float* y;             // [rows, width]
  int64_t width;        // > 0
};

void RunPanelTile(const PanelTile& tile);
void RunPanelTileAvx2(const PanelTile& tile);

}  // namespace kvasir::kernels
