// The kernel of distant_queries_cuda.h. Only distant_queries_cuda.cc includes it, after it has
// checked the shapes.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/sparse/common/distant_queries_cuda.h"
#include "kernels/sparse/common/select_cuda.h"

namespace kvasir::kernels {

struct DistantQueriesLaunch {
  SelectLaunch select = {};
  int64_t num_blocks = 0;
  int64_t most_rows = 0;  // queries of a query tile
  QueryDistance distance = {};
  void* to = nullptr;  // of the shape and dtype of select.q
};

cudaError_t LaunchDistantQueries(const DistantQueriesLaunch& params, cudaStream_t stream);

}  // namespace kvasir::kernels
