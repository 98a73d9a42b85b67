// The panel kernels in plain C++: the reference for the others, and what machines without them
// run. std::fma makes the bits those of the others; where it is not one instruction, it is a call.
#include <algorithm>
#include <array>
#include <cmath>

#include "kernels/base/dtype.h"
#include "kernels/gemm/gemm_panel.h"

namespace kvasir::kernels {
namespace {

constexpr int64_t kLanes = 8;
constexpr int64_t kWidth = 2 * kLanes;
using PanelRow = std::array<float, kWidth>;

float* BlockOfX(const PanelJob& job, int64_t row, int64_t k_begin) {
  return job.x_blocks + (k_begin / job.k_block * job.rows + row) * kMaxKBlock;
}

// Columns in order from bfloat16 that alternate (gemm_panel.h).
PanelRow FromPairs(const std::byte* data) {
  const auto* pairs = reinterpret_cast<const BFloat16*>(data);
  PanelRow row;
  for (int64_t j = 0; j < kWidth; ++j) {
    row[static_cast<size_t>(j)] = static_cast<float>(pairs[j % kLanes * 2 + j / kLanes]);
  }
  return row;
}

PanelRow DecodeRow(PanelFormat format, const std::byte* data) {
  if (format == PanelFormat::kBFloat16) return FromPairs(data);
  PanelRow row;
  for (int64_t j = 0; j < kWidth; ++j) {
    row[static_cast<size_t>(j)] =
        format == PanelFormat::kFloat32
            ? reinterpret_cast<const float*>(data)[j]
            : static_cast<float>(reinterpret_cast<const int8_t*>(data)[j]);
  }
  return row;
}

void PackRows(const PanelJob& job, int64_t row_begin, int64_t row_end) {
  const int64_t columns = job.weights.k;
  for (int64_t row = row_begin; row < row_end; ++row) {
    for (int64_t k = 0; k < columns; ++k) {
      const int64_t at = row * columns + k;
      BlockOfX(job, row, k)[k % job.k_block] =
          job.x_is_bfloat16 ? static_cast<float>(reinterpret_cast<const BFloat16*>(job.x)[at])
                            : reinterpret_cast<const float*>(job.x)[at];
    }
  }
}

void Finish(const PanelJob& job, int64_t row, int64_t panel, const PanelRow& sums) {
  const PanelWeights& w = job.weights;
  const int64_t end = std::min(w.n, (panel + 1) * kWidth);
  for (int64_t column = panel * kWidth; column < end; ++column) {
    float value = sums[static_cast<size_t>(column % kWidth)];
    if (w.bias != nullptr) value += w.bias[column];
    const int64_t at = row * w.n + column;
    if (job.y_is_bfloat16) {
      reinterpret_cast<BFloat16*>(job.y)[at] = BFloat16(value);
    } else {
      reinterpret_cast<float*>(job.y)[at] = value;
    }
  }
}

// 32 of k, or what is left of them.
void AddProducts(const PanelJob& job, int64_t row, int64_t panel, int64_t k_begin, PanelRow& sums) {
  const PanelWeights& w = job.weights;
  const PanelPlace place = FindPanel(w, kLanes, panel, k_begin);
  const int64_t stride = place.columns * ElementBytes(w.format);
  const float* x = BlockOfX(job, row, k_begin) + k_begin % job.k_block;
  const int64_t count = std::min(kScaleGroup, w.k - k_begin);
  for (int64_t i = 0; i < count; ++i) {
    const PanelRow weights = DecodeRow(w.format, place.weights + i * stride);
    for (size_t j = 0; j < kWidth; ++j) sums[j] = std::fma(x[i], weights[j], sums[j]);
  }
}

void RunRow(const PanelJob& job, int64_t row, int64_t panel) {
  PanelRow sums = {};
  for (int64_t k = 0; k < job.weights.k; k += kScaleGroup) {
    if (job.weights.format != PanelFormat::kInt8) {
      AddProducts(job, row, panel, k, sums);
      continue;
    }
    PanelRow chain = {};
    AddProducts(job, row, panel, k, chain);
    const PanelRow scales = FromPairs(FindPanel(job.weights, kLanes, panel, k).scales);
    for (size_t j = 0; j < kWidth; ++j) sums[j] = std::fma(chain[j], scales[j], sums[j]);
  }
  Finish(job, row, panel, sums);
}

void ManyRows(const PanelJob& job, const PanelItem& item, float*) {
  for (int64_t panel = item.panel_begin; panel < item.panel_end; ++panel) {
    for (int64_t row = item.row_begin; row < item.row_end; ++row) RunRow(job, row, panel);
  }
}

void FewRows(const PanelJob& job, int64_t group_begin, int64_t group_end) {
  const int64_t panels = GroupColumns(job.weights.format) / kWidth;
  ManyRows(job,
           {.row_end = job.rows,
            .panel_begin = group_begin * panels,
            .panel_end = std::min(group_end * panels, DivideUp(job.weights.n, kWidth))},
           nullptr);
}

}  // namespace

PanelKernels PortablePanelKernels() {
  return {.lanes = kLanes,
          .tile_rows = 1,
          .pack_rows = PackRows,
          .few_rows = FewRows,
          .many_rows = ManyRows};
}

}  // namespace kvasir::kernels
