// An Executor with its own threads, for tests and benchmarks of kernels. The calling thread takes
// part as thread 0. Thread-compatible.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "kernels/base/executor.h"
#include "kernels/base/mutex.h"

namespace kvasir::tests {

class ThreadExecutor : public kernels::Executor {
 public:
  explicit ThreadExecutor(int num_threads) {
    for (int t = 1; t < num_threads; ++t) threads_.emplace_back([this, t] { Work(t); });
  }
  ~ThreadExecutor() override {
    {
      kernels::MutexLock lock(mu_);
      stopping_ = true;
    }
    started_.NotifyAll();
    for (std::thread& thread : threads_) thread.join();
  }
  ThreadExecutor(const ThreadExecutor&) = delete;
  ThreadExecutor& operator=(const ThreadExecutor&) = delete;

  void ParallelFor(int64_t n, const std::function<void(int64_t, int)>& body) override {
    {
      kernels::MutexLock lock(mu_);
      body_ = &body;
      n_ = n;
      next_ = 0;
      busy_ = static_cast<int>(threads_.size());
      ++generation_;
    }
    started_.NotifyAll();
    Take(body, n, 0);
    kernels::MutexLock lock(mu_);
    while (busy_ > 0) finished_.Wait(mu_);
  }
  int num_threads() const override { return static_cast<int>(threads_.size()) + 1; }

 private:
  void Take(const std::function<void(int64_t, int)>& body, int64_t n, int thread) {
    for (int64_t i = next_++; i < n; i = next_++) body(i, thread);
  }

  void Work(int thread) {
    int64_t seen = 0;
    while (true) {
      const std::function<void(int64_t, int)>* body = nullptr;
      int64_t n = 0;
      {
        kernels::MutexLock lock(mu_);
        while (!stopping_ && generation_ == seen) started_.Wait(mu_);
        if (stopping_) return;
        seen = generation_;
        body = body_;
        n = n_;
      }
      Take(*body, n, thread);
      kernels::MutexLock lock(mu_);
      if (--busy_ == 0) finished_.NotifyOne();
    }
  }

  std::vector<std::thread> threads_;
  std::atomic<int64_t> next_ = 0;
  kernels::Mutex mu_;
  kernels::CondVar started_;
  kernels::CondVar finished_;
  const std::function<void(int64_t, int)>* body_ GUARDED_BY(mu_) = nullptr;
  int64_t n_ GUARDED_BY(mu_) = 0;
  int64_t generation_ GUARDED_BY(mu_) = 0;
  int busy_ GUARDED_BY(mu_) = 0;
  bool stopping_ GUARDED_BY(mu_) = false;
};

}  // namespace kvasir::tests
