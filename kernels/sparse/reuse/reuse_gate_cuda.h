// The verdict of reuse rules that read queries (reuse_rules.h), on the GPU. Before a selector's
// kernels start it decides for each row with memory which stage runs first, so that they skip
// stages that still serve (reuse_row.cuh). It also remembers the queries that stages are about to
// run with. It takes the same cosine as reusing_select.cc, summed in float64, so the verdict is the
// same unless the cosine is practically equal to a threshold. Called by the CUDA backend before a
// selector (worker/backend/cuda/cuda_select.cc). Thread-safe. Only in builds with CUDA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cuda_runtime_api.h>

#include "absl/status/status.h"

#include "kernels/sparse/common/cuda_selector.h"
#include "kernels/sparse/common/stages.h"

namespace kvasir::kernels {

// Bytes of device memory that JudgeReuse needs for `tiles` query tiles where ranks choose together.
int64_t JudgeReuseWorkspaceBytes(int64_t heads_of_layer, int64_t tiles);

// All pointers of the params, including spans and rotation, are device memory; q is the model's,
// rotated as the rotation says. REQUIRES: rows remember under a rule that reads queries, and query
// tiles with memory have one query each. Launches one kernel, or two and the sum between them where
// ranks choose together; allocates nothing and waits for nothing; may be captured. The cosine is
// over the query heads that choose together: at layer scope, all of the layer on all ranks, with
// the same verdict there. The workspace is read only where ranks choose together. INVALID_ARGUMENT
// on shapes. INTERNAL with CUDA's error when a launch fails. Cost: reads a row's queries and those
// that its stages ran with.
absl::Status JudgeReuse(const CudaSelectParams& params, Scope scope, const PageSelection& rows,
                        std::byte* workspace, cudaStream_t stream);

}  // namespace kvasir::kernels
