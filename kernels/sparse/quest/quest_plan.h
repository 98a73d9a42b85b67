// Which kernels serve a call of quest on the GPU. Needs no GPU.
#pragma once

#include <ostream>

#include "kernels/sparse/page_scores/page_score_plan.h"

namespace kvasir::kernels {

struct QuestPlan {
  SelectShape shape;
  PageScorePlan scores;

  // One kernel scores and chooses; otherwise one chooses by scores that others write.
  bool is_one_kernel() const { return scores.of_one_token; }
};

inline QuestPlan PlanQuest(const SelectShape& shape, bool has_many_queries) {
  return {.shape = shape, .scores = PlanPageScores(shape, has_many_queries, /*query_stride=*/1)};
}

inline std::ostream& operator<<(std::ostream& out, const QuestPlan& plan) {
  out << plan.shape << ": ";
  if (plan.is_one_kernel()) return out << "one kernel";
  return out << plan.scores << ", then the choice";
}

}  // namespace kvasir::kernels
