// Which kernels score the pages of a call (page_scores_launch.h). Needs no GPU.
#pragma once

#include <cstdint>
#include <ostream>

#include "kernels/sparse/common/select_cuda.h"
#include "kernels/sparse/common/select_shape.h"

namespace kvasir::kernels {

// Most pages of a slot whose scores fit in shared memory: 2.6 million tokens.
inline constexpr int64_t kMaxChosenPages = 40 * 1024;

struct PageScorePlan {
  bool by_products = false;       // page_products.cu serves the call
  bool has_many_queries = false;  // a query tile of it may have several queries
  // Every query tile of the call is one token. Kernels that choose by scores may then make the
  // scores themselves (page_stream.cuh).
  bool of_one_token = false;
};

// `query_stride`: queries of a tile that are averaged into one.
inline PageScorePlan PlanPageScores(const SelectShape& shape, bool has_many_queries,
                                    int64_t query_stride) {
  return {.by_products = shape.is_bf16() && (query_stride == 1 || !has_many_queries),
          .has_many_queries = has_many_queries,
          .of_one_token = shape.is_bf16() && !has_many_queries && shape.group <= kMaxCudaGroup &&
                          shape.max_pages <= kMaxChosenPages};
}

// Prints the kernels that write scores for another kernel to choose by.
inline std::ostream& operator<<(std::ostream& out, const PageScorePlan& plan) {
  if (!plan.by_products) return out << "plain scores of pages";
  return out << "products for few queries" << (plan.has_many_queries ? " and for many" : "");
}

}  // namespace kvasir::kernels
