// The selectors and pruners of the GPU, chosen by what a policy serves: which kernels run, the
// working memory they need, and calls over as many query tiles as that has room for. Called by
// CudaAttention, with policies that CheckCudaPolicies has passed. Functions without state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cuda_runtime_api.h>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/paged/page_selection.h"
#include "kernels/sparse/common/stages.h"
#include "worker/backend/cuda/step_table.h"
#include "worker/batch/step_batch.h"

namespace kvasir::worker {

// Upper limits over all rows and layers of a step.
struct SelectLimits {
  int64_t group = 0;          // query heads of a KV head
  int64_t capacity = 0;       // entries
  int64_t budget_tokens = 0;  // of selectors that list
  int64_t listed_tokens = 0;  // sink, window and list together, of selectors that list
  int64_t positions = 0;      // where keys are cached un-rotated: positions they are read at
};

// INVALID_ARGUMENT where a row's window is too small for its selector.
absl::StatusOr<SelectLimits> LimitsOf(const StepBatch& batch, const StepShape& shape, int64_t group,
                                      const kernels::PagedKv& kv);

// Bytes of device memory that any of the step's Select calls needs at most.
int64_t SelectWorkspaceBytes(const StepShape& shape, const SelectLimits& limits,
                             const kernels::PagedKv& kv);

struct SelectMemory {
  std::byte* workspace = nullptr;      // SelectWorkspaceBytes
  kernels::TensorView placed_queries;  // scratch like q, used with params.device_rope
};

// Judges reuse, selects and prunes for the rows of query tiles that `served` serves. With
// params.device_rope, rows are given their positions before pruning. Spans of the params are device
// memory.
absl::Status SelectOnGpu(const ServedSelector& served, const SelectLimits& limits,
                         const kernels::SelectParams& params, const kernels::PageSelection& rows,
                         const SelectMemory& memory, cudaStream_t stream);

}  // namespace kvasir::worker
