// A loop on an executor whose items may fail.
#pragma once

#include <atomic>
#include <cstdint>
#include <utility>

#include "absl/status/status.h"

#include "kernels/base/executor.h"
#include "kernels/base/mutex.h"

namespace kvasir::worker {

// Calls body(i, thread), which returns a status, as Executor::ParallelFor does. After an item has
// failed, items with larger indices are skipped. Returns the error of the first item that fails,
// the same one for any number of threads.
template <typename Body>
absl::Status TryParallelFor(kernels::Executor& executor, int64_t n, const Body& body) {
  std::atomic<int64_t> first_failed = n;
  kernels::Mutex mu;
  absl::Status error;  // of item first_failed
  executor.ParallelFor(n, [&](int64_t i, int thread) {
    if (i > first_failed.load(std::memory_order_relaxed)) return;
    absl::Status status = body(i, thread);
    if (status.ok()) return;
    kernels::MutexLock lock(mu);
    if (i >= first_failed.load(std::memory_order_relaxed)) return;
    first_failed.store(i, std::memory_order_relaxed);
    error = std::move(status);
  });
  return error;
}

}  // namespace kvasir::worker
