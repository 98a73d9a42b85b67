// std::mutex with clang's thread-safety annotations. Debian's absl::Mutex is invisible to
// ThreadSanitizer and gives false races, so every lock of the project is one of these.
#pragma once

#include <condition_variable>
#include <mutex>

#include "absl/base/thread_annotations.h"

#if defined(__clang__)
#define KVASIR_THREAD_ANNOTATION_(x) __attribute__((x))
#else
#define KVASIR_THREAD_ANNOTATION_(x)
#endif

// Some releases of Abseil define the unprefixed GUARDED_BY too; with its header before us the order
// of includes does not matter.
#undef GUARDED_BY
#define GUARDED_BY(x) KVASIR_THREAD_ANNOTATION_(guarded_by(x))
#define REQUIRES(...) KVASIR_THREAD_ANNOTATION_(requires_capability(__VA_ARGS__))
#define EXCLUDES(...) KVASIR_THREAD_ANNOTATION_(locks_excluded(__VA_ARGS__))

namespace kvasir::kernels {

class KVASIR_THREAD_ANNOTATION_(capability("mutex")) Mutex {
 public:
  void Lock() KVASIR_THREAD_ANNOTATION_(acquire_capability()) { mu_.lock(); }
  void Unlock() KVASIR_THREAD_ANNOTATION_(release_capability()) { mu_.unlock(); }

 private:
  friend class CondVar;
  std::mutex mu_;
};

class KVASIR_THREAD_ANNOTATION_(scoped_lockable) MutexLock {
 public:
  explicit MutexLock(Mutex& mu) KVASIR_THREAD_ANNOTATION_(acquire_capability(mu)) : mu_(mu) {
    mu_.Lock();
  }
  ~MutexLock() KVASIR_THREAD_ANNOTATION_(release_capability()) { mu_.Unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mu_;
};

// A condition variable over Mutex. The caller holds the mutex and re-checks its condition.
class CondVar {
 public:
  void Wait(Mutex& mu) REQUIRES(mu) {
    std::unique_lock<std::mutex> lock(mu.mu_, std::adopt_lock);
    cv_.wait(lock);
    lock.release();
  }
  // Returns false when `deadline` (of std::chrono::steady_clock) passed without a notification.
  template <typename TimePoint>
  bool WaitUntil(Mutex& mu, TimePoint deadline) REQUIRES(mu) {
    std::unique_lock<std::mutex> lock(mu.mu_, std::adopt_lock);
    const bool notified = cv_.wait_until(lock, deadline) == std::cv_status::no_timeout;
    lock.release();
    return notified;
  }
  void NotifyOne() { cv_.notify_one(); }
  void NotifyAll() { cv_.notify_all(); }

 private:
  std::condition_variable cv_;
};

}  // namespace kvasir::kernels
