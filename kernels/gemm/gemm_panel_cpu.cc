// The panel kernels in plain C++: the reference for the others, and what machines without them
// run. std::fma makes the bits those of the others; where it is not one instruction, it is a call.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#include "kernels/base/dtype.h"
#include "kernels/gemm/gemm_panel.h"

namespace kvasir::kernels {
namespace {

constexpr int64_t kLanes = 8;
constexpr int64_t kWidth = 2 * kLanes;
using PanelRow = std::array<float, kWidth>;
using IntRow = std::array<int32_t, kWidth>;

// x of a row as int16, of the units from k_begin on.
int16_t* RoundedX(const PanelJob& job, int64_t row, int64_t k_begin) {
  return reinterpret_cast<int16_t*>(UnitsOfX(job, row, k_begin));
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
  std::memcpy(row.data(), data, sizeof(row));
  return row;
}

float ElementOfX(const PanelJob& job, int64_t row, int64_t k) {
  const int64_t at = row * job.weights.inputs + k;
  return job.x_is_bfloat16 ? static_cast<float>(reinterpret_cast<const BFloat16*>(job.x)[at])
                           : reinterpret_cast<const float*>(job.x)[at];
}

void RoundGroup(const PanelJob& job, int64_t row, int64_t k_begin) {
  const int64_t count = std::min(kScaleGroup, job.weights.inputs - 2 * k_begin);
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const float x = ElementOfX(job, row, 2 * k_begin + i);
    largest = std::max(largest, std::bit_cast<uint32_t>(x) & 0x7fffffffu);
  }
  const XScale found = ScaleOfX(largest);
  *ScalesOfX(job, row, k_begin) = found.scale;
  for (int64_t i = 0; i < kScaleGroup; ++i) {
    const float x = i < count ? ElementOfX(job, row, 2 * k_begin + i) * found.inverse : 0;
    // With x that is not finite the scale makes the result NaN.
    RoundedX(job, row, k_begin)[i] =
        std::isfinite(x) ? static_cast<int16_t>(std::min(std::nearbyint(x), 32767.0f)) : int16_t{0};
  }
}

void PackRows(const PanelJob& job, int64_t row_begin, int64_t row_end) {
  for (int64_t row = row_begin; row < row_end; ++row) {
    if (job.weights.format == PanelFormat::kInt8) {
      for (int64_t k = 0; k < job.weights.k; k += kScaleUnits) RoundGroup(job, row, k);
    } else {
      for (int64_t k = 0; k < job.weights.k; ++k) {
        *UnitsOfX(job, row, k) = ElementOfX(job, row, k);
      }
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

// kScaleGroup of k, or what is left of them.
void AddProducts(const PanelJob& job, int64_t row, int64_t panel, int64_t k_begin, PanelRow& sums) {
  const PanelWeights& w = job.weights;
  const PanelPlace place = FindPanel(w, kLanes, panel, k_begin);
  const int64_t stride = place.columns * UnitBytes(w.format);
  const float* x = UnitsOfX(job, row, k_begin);
  const int64_t count = std::min(kScaleGroup, w.k - k_begin);
  for (int64_t i = 0; i < count; ++i) {
    const PanelRow weights = DecodeRow(w.format, place.weights + i * stride);
    for (size_t j = 0; j < kWidth; ++j) sums[j] = std::fma(x[i], weights[j], sums[j]);
  }
}

// The same of int8: kScaleUnits of k.
void AddScaledProducts(const PanelJob& job, int64_t row, int64_t panel, int64_t k_begin,
                       PanelRow& sums) {
  const PanelPlace place = FindPanel(job.weights, kLanes, panel, k_begin);
  const int16_t* x = RoundedX(job, row, k_begin);
  IntRow exact = {};
  for (int64_t k = 0; k < std::min(kScaleUnits, job.weights.k - k_begin); ++k) {
    const auto* unit = reinterpret_cast<const int8_t*>(place.weights) + 2 * k * place.columns;
    for (int64_t i = 0; i < 2 * kWidth; ++i) {
      exact[static_cast<size_t>(i / 2)] += int32_t{x[2 * k + i % 2]} * unit[i];
    }
  }
  const PanelRow scales = FromPairs(place.scales);
  const float x_scale = *ScalesOfX(job, row, k_begin);
  for (size_t j = 0; j < kWidth; ++j) {
    sums[j] = std::fma(static_cast<float>(exact[j]), scales[j] * x_scale, sums[j]);
  }
}

void RunRow(const PanelJob& job, int64_t row, int64_t panel) {
  PanelRow sums = {};
  if (job.weights.format == PanelFormat::kInt8) {
    for (int64_t k = 0; k < job.weights.k; k += kScaleUnits) {
      AddScaledProducts(job, row, panel, k, sums);
    }
  } else {
    for (int64_t k = 0; k < job.weights.k; k += kScaleGroup) AddProducts(job, row, panel, k, sums);
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
