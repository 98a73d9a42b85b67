// Which kernels serve a call of infinitehip on the GPU. Needs no GPU.
#pragma once

#include <cstdint>
#include <ostream>

#include "kernels/sparse/page_scores/page_score_plan.h"

namespace kvasir::kernels {

// The facts of a call that the choice depends on.
struct InfiniteHipCall {
  SelectShape shape;
  PageScorePlan pages;
  bool is_chunk_indexed = false;  // the layer's first stage scores chunks where they stand
  bool chooses_by_layer = false;  // the heads of a layer choose together
  int64_t decode_bytes = 0;       // shared memory of a CTA if one kernel runs all stages
};

struct InfiniteHipPlan {
  InfiniteHipCall call;
  // One kernel runs all stages and writes the lists; otherwise the first stage has kernels of its
  // own, and so have the later ones.
  bool is_one_kernel = false;
};

inline InfiniteHipPlan PlanInfiniteHip(const InfiniteHipCall& call) {
  constexpr int64_t kMostSharedBytes = 224 * 1024;
  return {.call = call,
          .is_one_kernel = call.pages.of_one_token && !call.is_chunk_indexed &&
                           !call.chooses_by_layer && call.decode_bytes <= kMostSharedBytes};
}

inline std::ostream& operator<<(std::ostream& out, const InfiniteHipPlan& plan) {
  out << plan.call.shape << ": ";
  if (plan.is_one_kernel) return out << "one kernel";
  if (plan.call.is_chunk_indexed) {
    out << "scores of chunks where they stand";
  } else {
    out << plan.call.pages;
  }
  return out << ", the first choice, later stages in "
             << (plan.call.chooses_by_layer ? "a kernel for each step" : "one kernel");
}

}  // namespace kvasir::kernels
