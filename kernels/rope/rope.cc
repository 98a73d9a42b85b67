#include "kernels/rope/rope.h"

#include <algorithm>
#include <cmath>

#include "kernels/base/cpu_isa.h"
#include "kernels/base/device_check.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/dense/elementwise.h"
#include "kernels/dense/parallel_rows.h"

namespace kvasir::kernels {
namespace {

constexpr IsaForms<void(const RopeTokens&, int64_t, int64_t)> kForms = {
    .portable = RunRopeTokens,
    .neon = KVASIR_ON_ARM(RunRopeTokensNeon),
    .avx2 = KVASIR_ON_X86(RunRopeTokensAvx2),
    .avx512 = KVASIR_ON_X86(RunRopeTokensAvx512)};

}  // namespace
namespace {

// A sine and a cosine in float64 cost about as much as this many elements of the other ops.
constexpr int64_t kAngleCost = 40;
// Number of positions that RopePositions adds at a time, because a context grows by one.
constexpr int64_t kPositionsStep = 1024;

// Writes the cosines and sines of one position.
void FillAngles(std::span<const double> inv_freq, double scaling, int64_t position, float* cos,
                float* sin) {
  for (size_t i = 0; i < inv_freq.size(); ++i) {
    const double angle = static_cast<double>(position) * inv_freq[i];
    cos[i] = static_cast<float>(std::cos(angle) * scaling);
    sin[i] = static_cast<float>(std::sin(angle) * scaling);
  }
}

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
      FillAngles(inv_freq_, attention_scaling_, positions[static_cast<size_t>(t)],
                 cos_.data() + t * half_dim(), sin_.data() + t * half_dim());
    }
  });
}

RopePositions::RopePositions(std::span<const double> inv_freq, double attention_scaling)
    : inv_freq_(inv_freq.begin(), inv_freq.end()), attention_scaling_(attention_scaling) {}

void RopePositions::Reserve(int64_t end, Executor& executor) {
  if (end <= end_) return;
  const int64_t known = end_;
  const int64_t half = head_dim() / 2;
  end_ = (end + kPositionsStep - 1) / kPositionsStep * kPositionsStep;
  cos_.resize(static_cast<size_t>(end_ * half));
  sin_.resize(static_cast<size_t>(end_ * half));
  ForRowChunks(executor, end_ - known, half * kAngleCost, [&](int64_t begin, int64_t chunk_end) {
    for (int64_t p = known + begin; p < known + chunk_end; ++p) {
      FillAngles(inv_freq_, attention_scaling_, p, cos_.data() + p * half, sin_.data() + p * half);
    }
  });
}

void RopePositions::Rotate(void* x, DType dtype, int64_t num_tokens, int64_t first) const {
  KVASIR_CHECK(first >= 0 && first + num_tokens <= end_);
  const int64_t half = head_dim() / 2;
  const RopeTokens tokens = {.x = x,
                             .cos = cos_.data() + first * half,
                             .sin = sin_.data() + first * half,
                             .dtype = dtype,
                             .heads = 1,
                             .half_dim = half};
  ChooseForm(kForms)(tokens, 0, num_tokens);
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
  const auto run = ChooseForm(kForms);
  ForRowChunks(executor, x.dim(0), x.dim(1) * x.dim(2),
               [&](int64_t begin, int64_t end) { run(tokens, begin, end); });
  return absl::OkStatus();
}

}  // namespace kvasir::kernels
