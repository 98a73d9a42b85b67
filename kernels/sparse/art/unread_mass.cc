#include "kernels/sparse/art/unread_mass.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>

#include "kernels/attention/attend.h"
#include "kernels/base/dtype.h"
#include "kernels/paged/compact_positions.h"
#include "kernels/sparse/page_scores/page_scores.h"

namespace kvasir::kernels {
namespace {

// Largest error, as a share of |u| r, when a rotated query or key is rounded.
float RoundingOf(const AttendParams& p) {
  const bool narrow =
      p.q.dtype() == DType::kBFloat16 || p.kv.layout.element_dtype() == DType::kBFloat16;
  return narrow ? 0x1p-7f : 0x1p-16f;
}

// Upper bound of u . k for the keys k that page bounds enclose, each rotated by at most `reach`
// positions. An infinite key, which may be multiplied by 0, gives an infinite bound.
template <typename Kv>
double BoundNear(const RopePositions& rope, const float* u, int64_t reach, float rounding,
                 const std::byte* page_bounds) {
  const int64_t half = rope.head_dim() / 2;
  const Kv* low = reinterpret_cast<const Kv*>(page_bounds);
  const Kv* high = low + 2 * half;
  float sum = 0;
  for (int64_t i = 0; i < half; ++i) {
    const float low_i = static_cast<float>(low[i]), low_j = static_cast<float>(low[half + i]);
    const float high_i = static_cast<float>(high[i]), high_j = static_cast<float>(high[half + i]);
    const float box =
        std::max(u[i] * low_i, u[i] * high_i) + std::max(u[half + i] * low_j, u[half + i] * high_j);
    const float far_i = std::max(std::abs(low_i), std::abs(high_i));
    const float far_j = std::max(std::abs(low_j), std::abs(high_j));
    const float longest =
        std::sqrt((u[i] * u[i] + u[half + i] * u[half + i]) * (far_i * far_i + far_j * far_j));
    const float turn =
        static_cast<float>(rope.inv_freq()[static_cast<size_t>(i)] * static_cast<double>(reach));
    sum += std::min(longest, box + turn * longest) + rounding * longest;
  }
  return std::isnan(sum) ? std::numeric_limits<double>::infinity() : double{sum};
}

}  // namespace

UnreadMass::Memory UnreadMass::Take(ScratchPieces& pieces, int64_t group, int64_t head_dim,
                                    int64_t skippable) {
  return {.signed_q = pieces.Take<float>(2 * head_dim),
          .workspace = pieces.Take<std::byte>(QuestScoreWorkspaceBytes(head_dim)),
          .sums = pieces.Take<double>(group * (skippable + 1)),
          .units = pieces.Take<double>(group)};
}

void UnreadMass::Make() {
  for (int64_t g = 0; g < row_.params.q.dim(1) / row_.params.kv.layout.num_kv_heads; ++g) {
    ScoreHead(g);
  }
  is_made_ = true;
}

// Writes the bounds in the place of the sums, then turns them into sums from the last page on.
void UnreadMass::ScoreHead(int64_t g) {
  const AttendParams& p = row_.params;
  const int64_t group = p.q.dim(1) / p.kv.layout.num_kv_heads;
  const int64_t q_row = row_.tile.first_row * p.q.dim(1) + row_.kv_head * group + g;
  const int64_t count = std::ssize(row_.skippable);
  double* const sums = memory_.sums + g * (count + 1);
  p.rope == nullptr ? BoundPages(q_row, sums) : BoundRotatedPages(q_row, sums);
  double unit = *std::max_element(sums, sums + count);
  // With no bound, or an infinite one, differences to it would be NaN.
  if (!std::isfinite(unit)) unit = 0;
  memory_.units[g] = unit;
  double sum = sums[count] = 0;
  for (int64_t i = count - 1; i >= 0; --i) {
    const int tokens = std::popcount(row_.skippable[static_cast<size_t>(i)].mask);
    sum += tokens * std::exp(sums[i] - unit);
    sums[i] = sum;
  }
}

const std::byte* UnreadMass::PageBounds(const PageStep& step) const {
  const PagedKv& kv = row_.params.kv;
  if (kv.extent(row_.tile.slot, step.page) < 0) return nullptr;
  return kv.Bounds(row_.tile.slot, step.page, row_.params.layer, row_.kv_head);
}

void UnreadMass::BoundPages(int64_t q_row, double* to) const {
  const AttendParams& p = row_.params;
  const PageScoreKernel kernel = ChoosePageScoreKernel(p.kv.layout, p.q.dtype());
  SplitQuery(kernel, p.q, q_row, 0, memory_.signed_q);
  const int64_t count = std::ssize(row_.skippable);
  for (int64_t begin = 0; begin < count; begin += kQuestScorePages) {
    const int64_t end = std::min(count, begin + kQuestScorePages);
    std::array<const std::byte*, kQuestScorePages> bounds = {};
    for (int64_t i = begin; i < end; ++i) {
      bounds[static_cast<size_t>(i - begin)] = PageBounds(row_.skippable[static_cast<size_t>(i)]);
    }
    float scores[kQuestScorePages];
    kernel.scores({.signed_q = memory_.signed_q,
                   .num_queries = 1,
                   .head_dim = p.kv.layout.head_dim,
                   .workspace = memory_.workspace},
                  bounds.data(), scores);
    for (int64_t i = begin; i < end; ++i) to[i] = double{p.scale} * double{scores[i - begin]};
  }
}

void UnreadMass::BoundRotatedPages(int64_t q_row, double* to) const {
  const AttendParams& p = row_.params;
  const int64_t d = p.kv.layout.head_dim;
  float* const query = memory_.signed_q;
  float* const rotated = query + d;
  for (int64_t i = 0; i < d; ++i) {
    query[i] = p.q.dtype() == DType::kFloat32
                   ? p.q.As<const float>()[q_row * d + i]
                   : static_cast<float>(p.q.As<const BFloat16>()[q_row * d + i]);
  }
  const double scale = double{p.scale} * p.rope->attention_scaling();
  for (int64_t i = 0; i < std::ssize(row_.skippable); ++i) {
    const PageStep& step = row_.skippable[static_cast<size_t>(i)];
    const std::byte* bounds = PageBounds(step);
    if (bounds == nullptr) {
      to[i] = -std::numeric_limits<double>::infinity();
      continue;
    }
    const auto position = [&](int64_t t) {
      return TokenPosition(row_.header, step.entry, step.page * kPageTokens + t);
    };
    const int64_t first = position(std::countr_zero(step.mask));
    const int64_t last = position(kPageTokens - 1 - std::countl_zero(step.mask));
    const int64_t middle = (first + last) / 2;
    std::copy_n(query, d, rotated);
    p.rope->Rotate(rotated, DType::kFloat32, 1,
                   QueryPosition(row_.header, row_.tile.first_position) - middle);
    auto* const bound =
        p.kv.layout.dtype == DType::kFloat32 ? BoundNear<float> : BoundNear<BFloat16>;
    to[i] = scale * bound(*p.rope, rotated, last - middle, RoundingOf(p), bounds);
  }
}

double UnreadMass::Share(const AttentionState& seen, int64_t g, int64_t next) const {
  return Sum(g, next) * std::exp(memory_.units[g] - double{seen.max}) / double{seen.sum};
}

bool UnreadMass::MayFallBelow(double limit, const AttentionState& seen, int64_t g,
                              int64_t next) const {
  if (next == 0) return true;  // the next page belongs to the window
  const double one = std::exp(memory_.units[g] - double{seen.max});
  const double most = double{seen.sum} + (Sum(g, next - 1) - Sum(g, next)) * one;
  return Sum(g, next) * one < limit * most;
}

}  // namespace kvasir::kernels
