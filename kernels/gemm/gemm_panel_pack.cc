#include "kernels/gemm/gemm_panel_pack.h"

#include <algorithm>
#include <cmath>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"

namespace kvasir::kernels {
namespace {

constexpr float kMaxInt8 = 127;

// Packs the columns of one panel, which are rows of the source.
class PanelPacker {
 public:
  PanelPacker(const WeightSource& source, PanelFormat format, int64_t lanes, std::byte* data)
      : source_(source),
        lanes_(lanes),
        weights_{.format = format,
                 .n = source.n(),
                 .inputs = source.k(),
                 .k = NumUnits(format, source.k()),
                 .data = data},
        data_(data) {}

  absl::Status Pack(int64_t panel, float* rows) {
    const int64_t begin = panel * 2 * lanes_;
    const int64_t count = std::min(2 * lanes_, source_.n() - begin);
    source_.ReadRows(begin, count, DType::kFloat32, reinterpret_cast<std::byte*>(rows));
    for (int64_t j = 0; j < count; ++j) {
      const std::span<const float> column(rows + j * source_.k(), static_cast<size_t>(source_.k()));
      for (int64_t k = 0; k < source_.k(); k += kScaleGroup) {
        const auto part = column.subspan(
            static_cast<size_t>(k), static_cast<size_t>(std::min(kScaleGroup, source_.k() - k)));
        if (!PackPart(panel, j, k, part)) {
          return absl::InvalidArgumentError(
              absl::StrCat("gemm: weights of output ", begin + j,
                           " are not all finite, so that int8 cannot hold them; take bfloat16"));
        }
      }
    }
    return absl::OkStatus();
  }

 private:
  // Where column j of a panel stands among bfloat16 that alternate.
  int64_t Alternating(int64_t j) const { return j % lanes_ * 2 + j / lanes_; }

  std::byte* Mutable(const std::byte* place) const { return data_ + (place - data_); }

  // Part of column j, from k on. False: int8 cannot hold it.
  bool PackPart(int64_t panel, int64_t j, int64_t k, std::span<const float> part) const {
    const PanelPlace place = FindPanel(weights_, lanes_, panel, NumUnits(weights_.format, k));
    float scale = 0;
    if (weights_.format == PanelFormat::kInt8) {
      if (!std::all_of(part.begin(), part.end(), [](float w) { return std::isfinite(w); })) {
        return false;
      }
      float max = 0;
      for (const float w : part) max = std::max(max, std::abs(w));
      scale = Int8Scale(max);
      reinterpret_cast<BFloat16*>(Mutable(place.scales))[Alternating(j)] = BFloat16(scale);
    }
    std::byte* row = Mutable(place.weights);
    const int64_t unit = UnitWeights(weights_.format);
    for (int64_t i = 0; i < static_cast<int64_t>(part.size()); ++i) {
      Write(row, j, i % unit, part[static_cast<size_t>(i)], scale);
      if (i % unit == unit - 1) row += place.columns * UnitBytes(weights_.format);
    }
    // The second weight of a last unit of int8 may be missing.
    if (part.size() % static_cast<size_t>(unit) != 0) Write(row, j, 1, 0, scale);
    return true;
  }

  // Weight `i` of a unit of column j.
  void Write(std::byte* row, int64_t j, int64_t i, float weight, float scale) const {
    switch (weights_.format) {
      case PanelFormat::kFloat32:
        reinterpret_cast<float*>(row)[j] = weight;
        return;
      case PanelFormat::kBFloat16:
        reinterpret_cast<BFloat16*>(row)[Alternating(j)] = BFloat16(weight);
        return;
      case PanelFormat::kBFloat16Pairs:
        reinterpret_cast<BFloat16*>(row)[2 * j + i] = BFloat16(weight);
        return;
      case PanelFormat::kInt8:
        reinterpret_cast<int8_t*>(row)[2 * j + i] = QuantizeToInt8(weight, scale);
        return;
    }
  }

  const WeightSource& source_;
  int64_t lanes_;
  PanelWeights weights_;
  std::byte* data_;
};

}  // namespace

float Int8Scale(float max) {
  const float exact = max / kMaxInt8;
  BFloat16 scale(exact);
  // The quotient of a denormal maximum may round to zero.
  if (static_cast<float>(scale) * kMaxInt8 < max) ++scale.bits;
  return static_cast<float>(scale);
}

int8_t QuantizeToInt8(float weight, float scale) {
  if (scale == 0) return 0;
  const float steps = std::nearbyint(weight / scale);
  return static_cast<int8_t>(std::clamp(steps, -kMaxInt8, kMaxInt8));
}

absl::StatusOr<PackedPanels> PackPanels(const WeightSource& source, PanelFormat format,
                                        int64_t lanes, HostArena& memory) {
  const int64_t panels = DivideUp(source.n(), 2 * lanes);
  const int64_t columns = panels * 2 * lanes;
  const auto float_size = static_cast<int64_t>(sizeof(float));
  PackedPanels packed;
  KVASIR_ASSIGN_OR_RETURN(
      packed.data, memory.Take(columns * PanelColumnBytes(format, NumUnits(format, source.k()))));
  KVASIR_ASSIGN_OR_RETURN(const HostBuffer rows,
                          HostBuffer::Allocate(2 * lanes * source.k() * float_size));
  PanelPacker packer(source, format, lanes, packed.data.data);
  for (int64_t p = 0; p < panels; ++p) {
    KVASIR_RETURN_IF_ERROR(packer.Pack(p, rows.As<float>()));
  }
  if (source.has_bias()) {
    KVASIR_ASSIGN_OR_RETURN(packed.bias, HostBuffer::Allocate(columns * float_size));
    source.ReadBias(packed.bias.As<float>());
  }
  return packed;
}

}  // namespace kvasir::kernels
