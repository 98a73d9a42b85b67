#include "worker/openmp_executor.h"

#include <omp.h>

namespace kvasir::worker {

OpenMpExecutor::OpenMpExecutor(int num_threads)
    : num_threads_(num_threads > 0 ? num_threads : omp_get_num_procs()) {}

void OpenMpExecutor::ParallelFor(int64_t n, const std::function<void(int64_t, int)>& body) {
  if (n <= 1 || num_threads_ == 1) {
    for (int64_t i = 0; i < n; ++i) body(i, 0);
    return;
  }
  // Dynamic: items differ much in length (contexts of a batch, ragged tiles).
#pragma omp parallel for schedule(dynamic, 1) num_threads(num_threads_)
  for (int64_t i = 0; i < n; ++i) body(i, omp_get_thread_num());
}

}  // namespace kvasir::worker
