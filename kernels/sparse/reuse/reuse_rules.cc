#include "kernels/sparse/reuse/reuse_rules.h"

namespace kvasir::kernels {
bool IntervalRule::Refreshes(const StageAge& age, const ReuseNumbers&) const {
  return IntervalRefreshes(age);
}

int64_t IntervalRule::ServedSteps(int64_t interval, const ReuseNumbers&) const { return interval; }

bool CosineRule::Refreshes(const StageAge& age, const ReuseNumbers& numbers) const {
  return CosineRefreshes(age, numbers);
}

int64_t CosineRule::ServedSteps(int64_t, const ReuseNumbers& numbers) const {
  return numbers.max_age;
}

bool BothRule::Refreshes(const StageAge& age, const ReuseNumbers& numbers) const {
  return BothRefreshes(age, numbers);
}

int64_t BothRule::ServedSteps(int64_t interval, const ReuseNumbers& numbers) const {
  if (numbers.theta >= 1) return interval;  // every query counts as turned away
  return kCapIntervals * interval;
}

}  // namespace kvasir::kernels
