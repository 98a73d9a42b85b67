// The reuse rules: when a stage of a selector runs again. A stage that serves keeps the output of
// its last run. Once a stage runs, all later stages run too.
//
//   rule        a stage runs again                                          window
//   interval    age >= n                                                    slides
//   cosine      age >= max_age or turned away                               grows
//   both        age >= 4 n or turned far away or (age >= n and turned away) slides
//
//   n             the stage's interval; age: steps since it ran
//   turned away   theta >= 1, or cos(q, the q it ran with) is below theta; far away: below
//                 theta_force. Over all heads of the group side by side, not rotated; over the
//                 layer's heads where the selector's scope is the layer.
//
// Sources: interval HiP (arXiv 2406.09827) and InfiniteHiP (arXiv 2502.08910, section 4.3), cosine
// TokenSelect (arXiv 2411.02886, section 3.4). Thread-safe.
#pragma once

#include <cstdint>

#include "kernels/base/host_device.h"
#include "kernels/sparse/common/stages.h"

namespace kvasir::kernels {

// NaN is below everything.
KVASIR_HOST_DEVICE constexpr bool IsBelow(float cosine, float theta) {
  return theta >= 1 || !(cosine >= theta);
}

// Most intervals that a stage serves under `both`.
inline constexpr int64_t kCapIntervals = 4;

// The rules, shared by CPU and GPU.
KVASIR_HOST_DEVICE constexpr bool IntervalRefreshes(const StageAge& age) {
  return age.steps >= age.interval;
}
KVASIR_HOST_DEVICE constexpr bool CosineRefreshes(const StageAge& age,
                                                  const ReuseNumbers& numbers) {
  return age.steps >= numbers.max_age || IsBelow(age.cosine, numbers.theta);
}
KVASIR_HOST_DEVICE constexpr bool BothRefreshes(const StageAge& age, const ReuseNumbers& numbers) {
  if (age.steps >= kCapIntervals * age.interval) return true;
  if (IsBelow(age.cosine, numbers.theta_force)) return true;
  return age.steps >= age.interval && IsBelow(age.cosine, numbers.theta);
}

class IntervalRule : public ReuseRule {
 public:
  bool Refreshes(const StageAge& age, const ReuseNumbers& numbers) const override;
  int64_t ServedSteps(int64_t interval, const ReuseNumbers& numbers) const override;
  bool ReadsQueries() const override { return false; }
  Window window() const override { return Window::kSlides; }
  DeviceReuseRule on_device() const override { return DeviceReuseRule::kInterval; }
};

class CosineRule : public ReuseRule {
 public:
  bool Refreshes(const StageAge& age, const ReuseNumbers& numbers) const override;
  int64_t ServedSteps(int64_t interval, const ReuseNumbers& numbers) const override;
  bool ReadsQueries() const override { return true; }
  Window window() const override { return Window::kGrows; }
  DeviceReuseRule on_device() const override { return DeviceReuseRule::kCosine; }
};

class BothRule : public ReuseRule {
 public:
  bool Refreshes(const StageAge& age, const ReuseNumbers& numbers) const override;
  int64_t ServedSteps(int64_t interval, const ReuseNumbers& numbers) const override;
  bool ReadsQueries() const override { return true; }
  Window window() const override { return Window::kSlides; }
  DeviceReuseRule on_device() const override { return DeviceReuseRule::kBoth; }
};

}  // namespace kvasir::kernels
