// The executor of a worker process: OpenMP's thread pool, which oneDNN uses too, so that the
// process has one pool and no more runnable threads than cores. Thread-compatible; all calls should
// come from one thread, since OpenMP keeps a pool per calling thread.
#pragma once

#include "kernels/base/executor.h"

namespace kvasir::worker {

class OpenMpExecutor final : public kernels::Executor {
 public:
  // num_threads <= 0: as many as the process may run on.
  explicit OpenMpExecutor(int num_threads);

  void ParallelFor(int64_t n, const std::function<void(int64_t i, int thread)>& body) override;
  int num_threads() const override { return num_threads_; }

 private:
  const int num_threads_;
};

}  // namespace kvasir::worker
