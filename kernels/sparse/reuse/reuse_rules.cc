#include "kernels/sparse/reuse/reuse_rules.h"

namespace kvasir::kernels {
namespace {

// Under `both`, intervals that a stage serves at most.
constexpr int64_t kCapIntervals = 4;

// NaN is below everything.
bool IsBelow(float cosine, float theta) { return theta >= 1 || !(cosine >= theta); }

}  // namespace

bool IntervalRule::Refreshes(const StageAge& age, const ReuseNumbers&) const {
  return IntervalIsOver(age.steps, age.interval);
}

int64_t IntervalRule::ServedSteps(int64_t interval, const ReuseNumbers&) const { return interval; }

bool CosineRule::Refreshes(const StageAge& age, const ReuseNumbers& numbers) const {
  return age.steps >= numbers.max_age || IsBelow(age.cosine, numbers.theta);
}

int64_t CosineRule::ServedSteps(int64_t, const ReuseNumbers& numbers) const {
  return numbers.max_age;
}

bool BothRule::Refreshes(const StageAge& age, const ReuseNumbers& numbers) const {
  if (age.steps >= kCapIntervals * age.interval) return true;
  if (IsBelow(age.cosine, numbers.theta_force)) return true;
  return age.steps >= age.interval && IsBelow(age.cosine, numbers.theta);
}

int64_t BothRule::ServedSteps(int64_t interval, const ReuseNumbers& numbers) const {
  if (numbers.theta >= 1) return interval;  // every query has turned away
  return kCapIntervals * interval;
}

}  // namespace kvasir::kernels
