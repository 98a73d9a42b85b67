#include "kernels/dense/rope.h"

#include <algorithm>
#include <cmath>

#include "kernels/base/cpu_features.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/dense/device_check.h"
#include "kernels/dense/elementwise.h"
#include "kernels/dense/parallel_rows.h"

namespace kvasir::kernels {
namespace {

// A sine and a cosine in float64 cost about as much as this many elements of the other ops.
constexpr int64_t kAngleCost = 40;

}  // namespace

RopeTable::RopeTable(std::span<const double> inv_freq, double attention_scaling)
    : inv_freq_(inv_freq.begin(), inv_freq.end()), attention_scaling_(attention_scaling) {}

void RopeTable::SetPositions(std::span<const int64_t> positions, Executor& executor) {
  num_tokens_ = static_cast<int64_t>(positions.size());
  const size_t size = positions.size() * inv_freq_.size();
  if (cos_.size() < size) {
    cos_.resize(size);
    sin_.resize(size);
  }
  ForRowChunks(executor, num_tokens_, half_dim() * kAngleCost, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const auto position = static_cast<double>(positions[static_cast<size_t>(t)]);
      const size_t row = static_cast<size_t>(t) * inv_freq_.size();
      for (size_t i = 0; i < inv_freq_.size(); ++i) {
        const double angle = position * inv_freq_[i];
        cos_[row + i] = static_cast<float>(std::cos(angle) * attention_scaling_);
        sin_[row + i] = static_cast<float>(std::sin(angle) * attention_scaling_);
      }
    }
  });
}

absl::Status ApplyRope(const RopeTable& table, const TensorView& x, Executor& executor) {
  ShapeCheck check("rope");
  check.Match("x", x, {table.num_tokens(), "heads", 2 * table.half_dim()})
      .Require(x.dtype() == DType::kFloat32 || x.dtype() == DType::kBFloat16,
               "x must be float32 or bfloat16");
  KVASIR_RETURN_IF_ERROR(check.status());
  KVASIR_RETURN_IF_ERROR(RequireHostMemory("rope", {x}));

  const RopeTokens tokens = {.x = x.data(),
                             .cos = table.cos(),
                             .sin = table.sin(),
                             .dtype = x.dtype(),
                             .heads = x.dim(1),
                             .half_dim = table.half_dim()};
  const auto run = ChooseByCpu(RunRopeTokens, RunRopeTokensAvx2, RunRopeTokensAvx512);
  ForRowChunks(executor, x.dim(0), x.dim(1) * x.dim(2),
               [&](int64_t begin, int64_t end) { run(tokens, begin, end); });
  return absl::OkStatus();
}

}  // namespace kvasir::kernels
