// The executor of a worker process: its own threads, which take the items of a loop one by one. The
// caller takes part and waits only for items that a thread has begun: a thread that the system is
// not running delays nobody, unlike OpenMP's barrier, which waits for every thread. Between loops,
// threads spin for a hundred microseconds (the loops of a step follow each other closely) and then
// sleep. oneDNN is called from these threads with one thread each, so the process has one pool.
// Thread-compatible: one ParallelFor at a time.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "kernels/base/executor.h"

namespace kvasir::worker {

class ThreadPool final : public kernels::Executor {
 public:
  // num_threads counts the caller. 0: as many as there are cores.
  explicit ThreadPool(int num_threads);
  ~ThreadPool() override;
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  void ParallelFor(int64_t n, const std::function<void(int64_t i, int thread)>& body) override;
  int num_threads() const override { return num_threads_; }

 private:
  // One loop. Two alternate, so that a thread that wakes up late and still reads the previous loop
  // cannot see a mixture of two.
  struct Loop {
    std::atomic<const std::function<void(int64_t, int)>*> body = nullptr;
    std::atomic<uint32_t> size = 0;
  };

  void RunLoop(uint32_t size, const std::function<void(int64_t, int)>& body);
  void RunThread(int thread);
  // Takes items of loop number `loop` until none is left.
  void TakeItems(uint32_t loop, int thread);

  const int num_threads_;
  std::array<Loop, 2> loops_;  // by parity of their number
  // Number of the current loop (high half) and its next item (low half): taking an item checks both
  // at once.
  std::atomic<uint64_t> next_ = 0;
  std::atomic<uint32_t> unfinished_ = 0;  // items of the current loop
  std::atomic<uint32_t> loop_ = 0;        // number of the current loop; sleeping threads watch it
  std::atomic<bool> stopping_ = false;
  std::vector<std::thread> threads_;  // last: they use everything above
};

}  // namespace kvasir::worker
