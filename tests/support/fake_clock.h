// A clock that a test moves. Whoever waits through it waits until the test says so: no test sleeps.
// Thread-safe.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "coordinator/time/clock.h"

namespace kvasir::testing {

class FakeClock : public coordinator::Clock {
 public:
  coordinator::TimePoint Now() const override {
    kernels::MutexLock lock(mu_);
    return now_;
  }

  void Wait(kernels::Mutex& mu, kernels::CondVar& changed,
            coordinator::TimePoint deadline) override {
    const Waiter waiter = {&mu, &changed};
    {
      kernels::MutexLock lock(mu_);
      if (now_ >= deadline) return;
      waiters_.push_back(waiter);
      arrived_.NotifyAll();
    }
    changed.Wait(mu);
    kernels::MutexLock lock(mu_);
    waiters_.erase(std::find(waiters_.begin(), waiters_.end(), waiter));
  }

  void Advance(absl::Duration duration) {
    std::vector<Waiter> waiters;
    {
      kernels::MutexLock lock(mu_);
      now_ = coordinator::After(now_, duration);
      waiters = waiters_;
    }
    for (const auto& [mu, changed] : waiters) {
      kernels::MutexLock lock(*mu);  // so that it waits already, or sees the new time
      changed->NotifyAll();
    }
  }

  // Returns once somebody waits for a time.
  void AwaitWaiter() {
    kernels::MutexLock lock(mu_);
    while (waiters_.empty()) arrived_.Wait(mu_);
  }

 private:
  using Waiter = std::pair<kernels::Mutex*, kernels::CondVar*>;

  mutable kernels::Mutex mu_;
  kernels::CondVar arrived_;
  coordinator::TimePoint now_ GUARDED_BY(mu_) = coordinator::TimePoint() + std::chrono::hours(1);
  std::vector<Waiter> waiters_ GUARDED_BY(mu_);
};

}  // namespace kvasir::testing
