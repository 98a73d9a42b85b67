// How the kernel of top_p divides a row among CTAs. Needs no GPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <ostream>

#include "kernels/sparse/common/select_shape.h"
#include "kernels/sparse/common/selection_header.h"

namespace kvasir::kernels {

// Weights of a CTA's heads in its shared memory. The rest are in device memory.
inline constexpr int64_t kSharedWeights = 16 * 1024;
// Most pages of a CTA at once.
inline constexpr int64_t kMostItems = 256;

struct TopPPlan {
  SelectShape shape;
  int log_ctas_of_row = 0;
  unsigned ctas_of_row = 1;    // 2^log_ctas_of_row, a cluster
  unsigned heads_of_cta = 1;   // heads whose weights a CTA has
  uint32_t shared_tokens = 0;  // tokens whose weights are in shared memory
  int64_t items_at_once = 0;   // pages that a CTA works on at once
};

// `capacity`: entries of a list. `max_tokens`: of a row.
inline TopPPlan PlanTopP(const SelectShape& shape, int64_t capacity, int64_t max_tokens) {
  constexpr int64_t kFewCtas = 128;  // of all rows together, where the rows are few
  constexpr int kMostLogCtasOfRow = 3;
  constexpr int64_t kWarp = 32;
  TopPPlan plan = {.shape = shape, .log_ctas_of_row = kMostLogCtasOfRow};
  while (plan.log_ctas_of_row > 0 && shape.rows << plan.log_ctas_of_row > kFewCtas) {
    --plan.log_ctas_of_row;
  }
  plan.ctas_of_row = 1u << plan.log_ctas_of_row;
  plan.heads_of_cta =
      (static_cast<unsigned>(shape.group) + plan.ctas_of_row - 1) / plan.ctas_of_row;
  plan.shared_tokens =
      static_cast<uint32_t>(std::min(max_tokens, kSharedWeights / plan.heads_of_cta) / 4 * 4);
  const int64_t most_items =
      capacity + CeilPages(max_tokens) + 2;  // sink and window may begin in a page
  const int64_t of_cta = (most_items + plan.ctas_of_row - 1) / plan.ctas_of_row;
  plan.items_at_once = std::min(kMostItems, (of_cta + kWarp - 1) / kWarp * kWarp);
  return plan;
}

inline std::ostream& operator<<(std::ostream& out, const TopPPlan& plan) {
  return out << plan.shape << ": " << plan.ctas_of_row << " CTAs a row, " << plan.heads_of_cta
             << " heads a CTA, weights of " << plan.shared_tokens << " tokens in shared memory, "
             << plan.items_at_once << " pages at once";
}

}  // namespace kvasir::kernels
