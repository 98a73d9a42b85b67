// The selector `quest` (arXiv 2406.10774) ranks the pages between sink and window by what the
// element-wise bounds of their keys say of their logits:
//
//   score(page) = max over the G query heads of the group and the tile's queries of
//                 sum_d high_d + w low_d                             (float32, not scaled)
//   high_d, low_d = the larger, the smaller of q_d * min_d and q_d * max_d
//
//   option score   "estimate" (default): w = 1/2; the better order (quest_rule.h).
//                  "bound": w = 0, the paper's. Every logit q . k of the page is <= its score (up
//                  to the rounding of sums of head_dim terms).
//
// Where keys are cached un-rotated, q of query r of the tile is rotated to distance window_tokens +
// r: the score is of the logits that the page's keys would have there. Candidates are the pages
// that intersect [sink_end, window_begin). The budget is rounded up to whole pages. Larger scores
// come first, then larger pages; a NaN score is the smallest. Entries hold whole pages. Differs
// from the paper: pages of 64, heads of a KV group choose together, the estimate
// (docs/decisions/0012). Errors: FAILED_PRECONDITION when the KV has no bounds. Cost: reads 4 *
// head_dim bytes (bfloat16) per candidate page and KV head, 1/64 of its K and V. Thread-compatible.
#pragma once

#include <memory>

#include "absl/status/statusor.h"

#include "kernels/sparse/common/method_options.h"
#include "kernels/sparse/common/stages.h"
#include "kernels/sparse/page_scores/quest_rule.h"

namespace kvasir::kernels {

class QuestSelector : public Selector {
 public:
  explicit QuestSelector(QuestScore score = QuestScore::kEstimate) : score_(score) {}
  // INVALID_ARGUMENT for an unknown option or score.
  static absl::StatusOr<QuestScore> Parse(const MethodOptions& options);
  static absl::StatusOr<std::unique_ptr<Selector>> Create(const MethodOptions& options);

  absl::Status Select(const SelectParams& params, PageSelection& out,
                      Executor& executor) const override;
  int64_t MaxEntries(const PolicyNumbers& numbers, int64_t tokens) const override;
  bool ReadsQueries() const override { return true; }
  SkipReason skip_reason() const override { return SkipReason::kSelectedOut; }
  GpuSupport SupportsGpu() const override { return {.runs = true, .reuses = true}; }

 private:
  const QuestScore score_;
};

}  // namespace kvasir::kernels
