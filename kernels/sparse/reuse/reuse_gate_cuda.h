// The verdict of reuse rules that look at queries (reuse_rules.h), on the GPU: before a selector's
// kernels it says, of each row with memory, which stage is the first to run, so that they leave out
// what serves (reuse_row.cuh); and remembers the queries that stages are about to run with. The
// same cosine as reusing_select.cc takes, summed up in float64: where it is not as good as equal to
// a threshold, the same verdict. Called by the attention layer. Thread-safe. Only in builds with
// CUDA.
#pragma once

#include <cuda_runtime_api.h>

#include "absl/status/status.h"

#include "kernels/sparse/stages.h"

namespace kvasir::kernels {

// All pointers of the params, spans and rotation included, are device memory; q is the model's,
// rotated as the rotation says. REQUIRES: rows remember under a rule that reads queries; blocks
// with memory are one query each. One kernel; nothing is allocated or waited for; may be captured.
// The cosine is of the query heads that choose together: of layer scope, all of params.kv.
// INVALID_ARGUMENT on shapes. INTERNAL with CUDA's error when the launch fails. Cost: reads a row's
// queries, and those that its stages ran with.
absl::Status JudgeReuse(const SelectParams& params, Scope scope, const PageSelection& rows,
                        cudaStream_t stream);

}  // namespace kvasir::kernels
