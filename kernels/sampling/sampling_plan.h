// How many CTAs sample a row on the GPU. Needs no GPU.
#pragma once

#include <cstdint>
#include <ostream>

namespace kvasir::kernels {

struct SamplingPlan {
  int64_t rows = 0;
  unsigned ctas_of_row = 1;  // a cluster
};

// `most_ctas_of_row`: CTAs of the largest cluster that the device has room for, a power of two.
inline SamplingPlan PlanSampling(int64_t rows, unsigned most_ctas_of_row) {
  // CTAs of all rows together, as long as a row has more than one: clusters cannot use all
  // multiprocessors.
  constexpr int64_t kMostCtas = 64;
  unsigned ctas = most_ctas_of_row;
  while (ctas > 1 && ctas * rows > kMostCtas) ctas /= 2;
  return {.rows = rows, .ctas_of_row = ctas};
}

inline std::ostream& operator<<(std::ostream& out, const SamplingPlan& plan) {
  return out << plan.rows << " rows of " << plan.ctas_of_row << " CTAs";
}

}  // namespace kvasir::kernels
