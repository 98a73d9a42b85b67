// Time as the coordinator sees it: monotonic, never the wall clock. Code that waits does so through
// a Clock, so that in tests a fake one can pass hours at once. Implementations are thread-safe.
#pragma once

#include <algorithm>
#include <chrono>
#include <optional>

#include "absl/time/time.h"

#include "kernels/base/mutex.h"

namespace kvasir::coordinator {

using TimePoint = std::chrono::steady_clock::time_point;

inline absl::Duration Between(TimePoint from, TimePoint to) { return absl::FromChrono(to - from); }
inline TimePoint After(TimePoint from, absl::Duration duration) {
  return from + absl::ToChronoNanoseconds(duration);
}

// No time is later than every other one.
inline std::optional<TimePoint> Earlier(std::optional<TimePoint> a, std::optional<TimePoint> b) {
  if (!a.has_value() || !b.has_value()) return a.has_value() ? a : b;
  return std::min(*a, *b);
}

class Clock {
 public:
  virtual ~Clock() = default;
  virtual TimePoint Now() const = 0;
  // Waits on `changed` until it is notified or `deadline` has passed. May also return early, so the
  // caller checks its condition and the time again.
  virtual void Wait(kernels::Mutex& mu, kernels::CondVar& changed, TimePoint deadline)
      REQUIRES(mu) = 0;
};

class SteadyClock : public Clock {
 public:
  TimePoint Now() const override { return std::chrono::steady_clock::now(); }
  void Wait(kernels::Mutex& mu, kernels::CondVar& changed, TimePoint deadline) override
      REQUIRES(mu) {
    changed.WaitUntil(mu, deadline);
  }
};

}  // namespace kvasir::coordinator
