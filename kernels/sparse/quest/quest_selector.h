// The selector `quest` (arXiv 2406.10774): pages between sink and window ranked by an upper bound
// of their logits, from the element-wise bounds of their keys:
//
//   score(page) = max over the G query heads of the group and the block's queries of
//                 sum_d max(q_d * min_d, q_d * max_d)                (float32, not scaled)
//
// Every logit q . k of the page is <= its score (up to the rounding of sums of head_dim terms).
// Where keys are cached un-rotated, q of query r of the block is rotated to distance
// window_tokens + r: the score bounds the logits that the page's keys had there.
// Candidates are the pages that intersect [sink_end, window_begin); the budget is rounded up to
// whole pages; larger score first, then larger page first; a NaN score is the smallest. Entries
// hold whole pages; `score` is the bound.
// Errors: FAILED_PRECONDITION when the KV has no bounds. Cost: reads 4 * head_dim bytes (bfloat16)
// per candidate page and KV head, 1/64 of its K and V. Thread-compatible.
#pragma once

#include "kernels/sparse/stages.h"

namespace kvasir::kernels {

class QuestSelector : public Selector {
 public:
  absl::Status Select(const SelectParams& params, PageSelection& out,
                      Executor& executor) const override;
  int64_t MaxEntries(const SelectionNumbers& numbers, int64_t tokens) const override;
  bool ReadsQueries() const override { return true; }
  SkipReason skip_reason() const override { return SkipReason::kSelectedOut; }
};

}  // namespace kvasir::kernels
