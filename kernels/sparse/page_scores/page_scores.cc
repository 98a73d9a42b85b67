#include "kernels/sparse/page_scores/page_scores.h"

#include <algorithm>
#include <array>

#include "kernels/base/cpu_isa.h"

namespace kvasir::kernels {
namespace {

constexpr IsaForms<QuestScoreFn> kFloat32Forms = {
    .portable = QuestScoresFloat32,
    .neon = KVASIR_ON_ARM(QuestScoresNeonFloat32),
    .avx2 = KVASIR_ON_X86(QuestScoresAvx2Float32),
    .avx512 = KVASIR_ON_X86(QuestScoresAvx512Float32)};
constexpr IsaForms<QuestScoreFn> kBFloat16Forms = {
    .portable = QuestScoresBFloat16,
    .neon = KVASIR_ON_ARM(QuestScoresNeonBFloat16),
    .avx2 = KVASIR_ON_X86(QuestScoresAvx2BFloat16),
    .avx512 = KVASIR_ON_X86(QuestScoresAvx512BFloat16)};

constexpr int64_t kCacheLine = 64;

using Bounds = std::array<const std::byte*, kQuestScorePages>;

// Returns the bounds of kQuestScorePages pages from `begin`. Null from `end` on and where there is
// no block.
Bounds FindBounds(const SelectRow& row, int64_t begin, int64_t end) {
  const PagedKv& kv = row.p.kv;
  Bounds bounds = {};
  const int64_t count = std::min(kQuestScorePages, end - begin);
  for (int64_t i = 0; i < count; ++i) {
    if (kv.extent(row.tile.slot, begin + i) < 0) continue;
    const std::byte* found = kv.Bounds(row.tile.slot, begin + i, row.p.layer, row.kv_head);
    for (int64_t at = 0; at < kv.layout.page_bounds_bytes(); at += kCacheLine) {
      __builtin_prefetch(found + at);
    }
    bounds[static_cast<size_t>(i)] = found;
  }
  return bounds;
}

}  // namespace

PageScoreKernel ChoosePageScoreKernel(const KvLayout& layout, DType queries) {
  const bool bf16_kv = layout.element_dtype() == DType::kBFloat16;
  if (layout.head_dim % kQuestScoreHeadDimStep != 0) {
    return {.scores = bf16_kv ? QuestScoresBFloat16 : QuestScoresFloat32};
  }
  if (bf16_kv && queries == DType::kBFloat16 && ChosenCpuIsa() == CpuIsa::kAvx512Bf16) {
    return {.scores = KVASIR_ON_X86(QuestScoresAvx512Bf16Pairs), .bf16_queries = true};
  }
  return {.scores = ChooseForm(bf16_kv ? kBFloat16Forms : kFloat32Forms)};
}

void SplitQuery(const PageScoreKernel& kernel, const TensorView& q, int64_t q_row, int64_t row,
                void* signed_q) {
  const int64_t d = q.dim(2);
  const auto split = [&](const auto* from) {
    if (kernel.bf16_queries) {
      SplitBySign(from + q_row * d, d, QuestScore::kBound,
                  static_cast<BFloat16*>(signed_q) + row * 2 * d);
    } else {
      SplitBySign(from + q_row * d, d, QuestScore::kBound,
                  static_cast<float*>(signed_q) + row * 2 * d);
    }
  };
  if (q.dtype() == DType::kFloat32) return split(q.As<const float>());
  split(q.As<const BFloat16>());
}

// The next pages' bounds are prefetched while others are scored, because blocks may lie anywhere.
void ScorePages(const SelectRow& row, QuestScoreFn* function, const QuestScoreParams& params,
                int64_t begin, int64_t end, float* scores) {
  Bounds bounds = FindBounds(row, begin, end);
  for (int64_t page = begin; page < end; page += kQuestScorePages) {
    const Bounds next = FindBounds(row, page + kQuestScorePages, end);
    float found[kQuestScorePages];
    function(params, bounds.data(), found);
    std::copy_n(found, std::min(kQuestScorePages, end - page), scores + page - begin);
    bounds = next;
  }
}

}  // namespace kvasir::kernels
