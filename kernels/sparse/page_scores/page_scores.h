// Quest's scores (quest_score.h) of a run of pages, by the fastest function of the machine. Used by
// the selectors `quest` and `infinitehip`, and by the guard of `art`. Thread-safe.
#pragma once

#include <cstdint>

#include "kernels/base/dtype.h"
#include "kernels/sparse/common/select_common.h"
#include "kernels/sparse/page_scores/quest_rule.h"
#include "kernels/sparse/page_scores/quest_score.h"

namespace kvasir::kernels {

// The function that serves queries of a dtype, and whether it takes them in bfloat16 (else
// float32).
struct PageScoreKernel {
  QuestScoreFn* scores = nullptr;
  bool bf16_queries = false;
};

PageScoreKernel ChoosePageScoreKernel(const KvLayout& layout, DType queries);

// Writes the parts of a query that multiply min, then those that multiply max (quest_rule.h): a row
// of QuestScoreParams::signed_q.
template <typename From, typename To>
void SplitBySign(const From* q, int64_t head_dim, QuestScore score, To* signed_q) {
  const float low_weight = LowWeight(score);
  for (int64_t i = 0; i < head_dim; ++i) {
    const float x = static_cast<float>(q[i]);
    signed_q[i] = static_cast<To>(ForMin(x, low_weight));
    signed_q[head_dim + i] = static_cast<To>(ForMax(x, low_weight));
  }
}

// Writes query head `q_row` of q, in the form that `kernel` takes for bounds, to row `row` of
// QuestScoreParams::signed_q.
void SplitQuery(const PageScoreKernel& kernel, const TensorView& q, int64_t q_row, int64_t row,
                void* signed_q);

// scores[i] = score of page begin + i of the row's slot, layer and KV head, for pages [begin, end);
// -inf where the slot has no such block. REQUIRES: the KV has bounds.
void ScorePages(const SelectRow& row, QuestScoreFn* function, const QuestScoreParams& params,
                int64_t begin, int64_t end, float* scores);

}  // namespace kvasir::kernels
