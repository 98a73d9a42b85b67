// The panel engine: the reference for gemm, and its backend on machines for which oneDNN has no
// brgemm.
#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/base/buffer.h"
#include "kernels/base/status_macros.h"
#include "kernels/dense/gemm_engine.h"
#include "kernels/dense/gemm_panel.h"

namespace kvasir::kernels {
namespace {

int64_t NumPanels(int64_t width) { return (width + kPanelColumns - 1) / kPanelColumns; }

class PanelGemm : public GemmEngine {
 public:
  PanelGemm(const WeightSource& source, PanelIsa isa)
      : k_(source.k()),
        slices_(ChooseGemmSlices(source.n(), source.k(), DType::kFloat32)),
        isa_(isa) {}

  absl::Status Initialize(const WeightSource& source) {
    const int64_t panel = k_ * kPanelColumns;
    const auto float_size = static_cast<int64_t>(sizeof(float));
    // Slices begin at multiples of 16 columns, so panels of all slices lie side by side.
    static_assert(64 % kPanelColumns == 0);
    KVASIR_ASSIGN_OR_RETURN(packed_,
                            HostBuffer::Allocate(NumPanels(slices_.n) * panel * float_size));
    KVASIR_ASSIGN_OR_RETURN(const HostBuffer rows, HostBuffer::Allocate(panel * float_size));
    for (int64_t p = 0; p < NumPanels(slices_.n); ++p) {
      const int64_t columns = std::min(kPanelColumns, slices_.n - p * kPanelColumns);
      source.ReadRows(p * kPanelColumns, columns, DType::kFloat32, rows.data());
      float* out = packed_.As<float>() + p * panel;
      for (int64_t j = 0; j < columns; ++j) {
        for (int64_t k = 0; k < k_; ++k) out[k * kPanelColumns + j] = rows.As<float>()[j * k_ + k];
      }
    }
    if (!source.has_bias()) return absl::OkStatus();
    bias_.resize(static_cast<size_t>(slices_.n));
    source.ReadBias(bias_.data());
    return absl::OkStatus();
  }

  const GemmSlices& slices() const override { return slices_; }
  DType input() const override { return DType::kFloat32; }
  DType output() const override { return DType::kFloat32; }
  std::string name() const override {
    return isa_ == PanelIsa::kAvx2 ? "panel:avx2" : "panel:portable";
  }
  int64_t scratch_bytes() const override { return 0; }
  absl::Status Prepare(int) override { return absl::OkStatus(); }

  absl::Status RunTile(const GemmTile& tile) override {
    const int64_t begin = slices_.begin(tile.slice);
    const PanelTile panel_tile = {.x = reinterpret_cast<const float*>(tile.x),
                                  .rows = tile.rows,
                                  .k = k_,
                                  .panels = packed_.As<float>() + begin * k_,
                                  .bias = bias_.empty() ? nullptr : bias_.data() + begin,
                                  .y = reinterpret_cast<float*>(tile.y),
                                  .width = slices_.width_of(tile.slice)};
    if (isa_ == PanelIsa::kAvx2) {
      RunPanelTileAvx2(panel_tile);
    } else {
      RunPanelTile(panel_tile);
    }
    return absl::OkStatus();
  }

 private:
  int64_t k_;
  GemmSlices slices_;
  PanelIsa isa_;
  HostBuffer packed_;
  std::vector<float> bias_;  // empty without a bias
};

}  // namespace

void RunPanelTile(const PanelTile& tile) {
  for (int64_t column = 0; column < tile.width; column += kPanelColumns) {
    const float* panel = tile.panels + column * tile.k;
    const int64_t columns = std::min(kPanelColumns, tile.width - column);
    for (int64_t row = 0; row < tile.rows; ++row) {
      const float* x = tile.x + row * tile.k;
      float sums[kPanelColumns] = {};
      for (int64_t k = 0; k < tile.k; ++k) {
        for (int64_t j = 0; j < kPanelColumns; ++j) sums[j] += x[k] * panel[k * kPanelColumns + j];
      }
      for (int64_t j = 0; tile.bias != nullptr && j < columns; ++j)
        sums[j] += tile.bias[column + j];
      std::memcpy(tile.y + row * tile.width + column, sums,
                  static_cast<size_t>(columns) * sizeof(float));
    }
  }
}

absl::StatusOr<std::unique_ptr<GemmEngine>> CreatePanelGemm(const WeightSource& source,
                                                            PanelIsa isa) {
  auto engine = std::make_unique<PanelGemm>(source, isa);
  KVASIR_RETURN_IF_ERROR(engine->Initialize(source));
  return engine;
}

}  // namespace kvasir::kernels
