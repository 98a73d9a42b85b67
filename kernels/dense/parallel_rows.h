// Spreads an element-wise op over an executor by chunks of rows. Internal to this folder.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/base/executor.h"

namespace kvasir::kernels {

// Calls body(begin, end) for disjoint ranges that cover [0, rows). Uses the calling thread alone
// when there is too little work to wake others for (about 10 us a chunk).
template <typename Body>
void ForRowChunks(Executor& executor, int64_t rows, int64_t elements_per_row, const Body& body) {
  constexpr int64_t kMinChunkElements = 16384;
  const int64_t min_rows =
      std::max<int64_t>(1, kMinChunkElements / std::max<int64_t>(1, elements_per_row));
  const int64_t chunks_wanted = 4 * static_cast<int64_t>(executor.num_threads());
  const int64_t chunk = std::max(min_rows, (rows + chunks_wanted - 1) / chunks_wanted);
  if (executor.num_threads() == 1 || rows <= chunk) {
    if (rows > 0) body(int64_t{0}, rows);
    return;
  }
  const struct {
    const Body& body;
    int64_t rows, chunk;
  } job = {body, rows, chunk};
  executor.ParallelFor((rows + chunk - 1) / chunk, [&job](int64_t i, int) {
    job.body(i * job.chunk, std::min(job.rows, (i + 1) * job.chunk));
  });
}

}  // namespace kvasir::kernels
