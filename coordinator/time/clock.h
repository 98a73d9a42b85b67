// Time as the coordinator sees it: monotonic, never the wall clock. Code that waits does so through
// a Clock, so that in tests a fake one can pass hours at once. Implementations are thread-safe.
#pragma once

#include <chrono>

#include "absl/time/time.h"

#include "kernels/base/mutex.h"

namespace kvasir::coordinator {

using TimePoint = std::chrono::steady_clock::time_point;

inline absl::Duration Between(TimePoint from, TimePoint to) { return absl::FromChrono(to - from); }
inline TimePoint After(TimePoint from, absl::Duration duration) {
  return from + absl::ToChronoNanoseconds(duration);
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
