// Separate threads that tokenize long texts, so that they do not delay streams, which gRPC's
// threads serve. They start with the first long texts. Bounded in threads and in bytes, with lower
// priority than threads that serve streams. Made by the server, called by the service. Thread-safe.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "absl/status/status.h"

#include "kernels/base/mutex.h"

namespace kvasir::coordinator {

class TextPool {
 public:
  // Largest short request: tokenizing it takes about a millisecond.
  static constexpr size_t kShortBytes = size_t{1} << 16;
  static constexpr size_t kThreads = 2;
  // Most bytes of requests that wait or are worked on.
  static constexpr size_t kMostBytes = size_t{256} << 20;

  ~TextPool();  // waits until all work is done

  // Does `work` for a request of `bytes`: at once when it is short, otherwise on a thread of the
  // pool. Drops `work` when too much waits: RESOURCE_EXHAUSTED with a time to try again.
  absl::Status Run(size_t bytes, std::function<void()> work) EXCLUDES(mu_);

 private:
  struct Job {
    size_t bytes;
    std::function<void()> work;
  };

  void RunThread() EXCLUDES(mu_);

  kernels::Mutex mu_;
  kernels::CondVar changed_;
  std::deque<Job> waiting_ GUARDED_BY(mu_);
  size_t bytes_ GUARDED_BY(mu_) = 0;  // of all that wait or are worked on
  bool stopping_ GUARDED_BY(mu_) = false;
  std::vector<std::thread> threads_ GUARDED_BY(mu_);
};

}  // namespace kvasir::coordinator
