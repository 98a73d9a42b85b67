// The source of parallelism for CPU ops. Ops own no threads: the process that calls them passes an
// Executor. CUDA ops take a stream instead. Implementations are thread-compatible: one ParallelFor
// at a time.
#pragma once

#include <cstdint>
#include <functional>

namespace kvasir::kernels {

class Executor {
 public:
  virtual ~Executor() = default;
  // Calls body(i, thread) once for every i in [0, n), in any order, on up to num_threads() threads;
  // returns when all calls have returned. `thread` is in [0, num_threads()) and no two concurrent
  // calls share it, so it may index scratch memory.
  virtual void ParallelFor(int64_t n, const std::function<void(int64_t i, int thread)>& body) = 0;
  virtual int num_threads() const = 0;
};

// Runs everything on the calling thread.
class SerialExecutor : public Executor {
 public:
  void ParallelFor(int64_t n, const std::function<void(int64_t, int)>& body) override {
    for (int64_t i = 0; i < n; ++i) body(i, 0);
  }
  int num_threads() const override { return 1; }
};

}  // namespace kvasir::kernels
