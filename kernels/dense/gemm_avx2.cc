// Compiled for AVX2 and FMA; see the warning in gemm_panel.h.
#include <cstddef>
#include <immintrin.h>

#include "kernels/dense/gemm_panel.h"

namespace kvasir::kernels {
namespace {

// 6 rows x 16 columns are 12 accumulators; two weights and one x make 15 of the 16 registers.
constexpr int64_t kMaxRows = 6;

struct Block {
  const float* x;  // [kRows, k]
  int64_t k;
  const float* panel;  // [k][16]
  const float* bias;   // [columns], or null
  float* y;            // [kRows][columns], rows y_stride apart
  int64_t y_stride;
  int64_t columns;  // 1 .. 16
};

template <size_t kRows>
void RunBlock(const Block& b) {
  __m256 low[kRows];
  __m256 high[kRows];
  for (size_t r = 0; r < kRows; ++r) low[r] = high[r] = _mm256_setzero_ps();
  for (int64_t k = 0; k < b.k; ++k) {
    const __m256 w_low = _mm256_load_ps(b.panel + k * kPanelColumns);
    const __m256 w_high = _mm256_load_ps(b.panel + k * kPanelColumns + 8);
    for (size_t r = 0; r < kRows; ++r) {
      const __m256 x = _mm256_broadcast_ss(b.x + static_cast<int64_t>(r) * b.k + k);
      low[r] = _mm256_fmadd_ps(x, w_low, low[r]);
      high[r] = _mm256_fmadd_ps(x, w_high, high[r]);
    }
  }
  for (size_t r = 0; r < kRows; ++r) {
    alignas(32) float sums[kPanelColumns];
    _mm256_store_ps(sums, low[r]);
    _mm256_store_ps(sums + 8, high[r]);
    float* y = b.y + static_cast<int64_t>(r) * b.y_stride;
    for (int64_t j = 0; j < b.columns; ++j) {
      y[j] = b.bias == nullptr ? sums[j] : sums[j] + b.bias[j];
    }
  }
}

void RunRows(int64_t rows, const Block& block) {
  switch (rows) {
    case 1:
      return RunBlock<1>(block);
    case 2:
      return RunBlock<2>(block);
    case 3:
      return RunBlock<3>(block);
    case 4:
      return RunBlock<4>(block);
    case 5:
      return RunBlock<5>(block);
    default:
      return RunBlock<kMaxRows>(block);
  }
}

}  // namespace

void RunPanelTileAvx2(const PanelTile& tile) {
  for (int64_t column = 0; column < tile.width; column += kPanelColumns) {
    const int64_t columns =
        tile.width - column < kPanelColumns ? tile.width - column : kPanelColumns;
    for (int64_t row = 0; row < tile.rows; row += kMaxRows) {
      const int64_t rows = tile.rows - row < kMaxRows ? tile.rows - row : kMaxRows;
      RunRows(rows, {.x = tile.x + row * tile.k,
                     .k = tile.k,
                     .panel = tile.panels + column * tile.k,
                     .bias = tile.bias == nullptr ? nullptr : tile.bias + column,
                     .y = tile.y + row * tile.width + column,
                     .y_stride = tile.width,
                     .columns = columns});
    }
  }
}

}  // namespace kvasir::kernels
