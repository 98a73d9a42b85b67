// A thread that does work in the order in which others gave it. It starts with the first. Members
// of classes whose results others collect: it hides the queue and its end. Thread-safe.
#pragma once

#include <deque>
#include <functional>
#include <optional>
#include <thread>
#include <utility>

#include "kernels/base/mutex.h"
#include "proto/process/named_thread.h"

namespace kvasir::proto {

template <typename Work>
class WorkThread {
 public:
  // `name`: as of NamedThread. `run` is called on the thread.
  WorkThread(const char* name, std::function<void(Work)> run) : name_(name), run_(std::move(run)) {}
  ~WorkThread() { Stop(); }
  WorkThread(const WorkThread&) = delete;
  WorkThread& operator=(const WorkThread&) = delete;

  void Add(Work work) EXCLUDES(mu_) {
    kernels::MutexLock lock(mu_);
    if (stopping_) return;
    waiting_.push_back(std::move(work));
    if (!thread_.joinable()) thread_ = NamedThread(name_, [this] { RunAll(); });
    changed_.NotifyAll();
  }
  // Waits for the work that is done now. What has not begun, or is added later, is dropped. Called
  // by one thread.
  void Stop() EXCLUDES(mu_) {
    {
      kernels::MutexLock lock(mu_);
      stopping_ = true;
      changed_.NotifyAll();
    }
    if (thread_.joinable()) thread_.join();
  }

 private:
  void RunAll() EXCLUDES(mu_) {
    for (;;) {
      std::optional<Work> next;
      {
        kernels::MutexLock lock(mu_);
        while (waiting_.empty() && !stopping_) changed_.Wait(mu_);
        if (stopping_) return;
        next = std::move(waiting_.front());
        waiting_.pop_front();
      }
      run_(*std::move(next));
    }
  }

  const char* const name_;
  const std::function<void(Work)> run_;
  kernels::Mutex mu_;
  kernels::CondVar changed_;
  std::deque<Work> waiting_ GUARDED_BY(mu_);
  bool stopping_ GUARDED_BY(mu_) = false;
  std::thread thread_;  // made under mu_; joined when nothing makes it any more
};

}  // namespace kvasir::proto
