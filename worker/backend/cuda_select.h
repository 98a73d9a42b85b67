// The selectors and pruners that there are on the GPU, by what a policy serves: which kernels run,
// the working memory that they need, and calls over as many query blocks as it has room for. Called
// by CudaAttention, with policies that CheckCudaPolicies lets pass. Functions without state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cuda_runtime_api.h>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/paged/page_selection.h"
#include "kernels/sparse/stages.h"
#include "worker/backend/step_table.h"
#include "worker/step_batch.h"

namespace kvasir::worker {

// What no row of a step goes beyond, in any layer.
struct SelectLimits {
  int64_t group = 0;          // query heads of a KV head
  int64_t capacity = 0;       // entries
  int64_t budget_tokens = 0;  // of those that list
  int64_t listed_tokens = 0;  // sink, window and list together, likewise
  int64_t positions = 0;      // where keys are cached un-rotated: that they are read at
};

// INVALID_ARGUMENT where a row's window is too small for its selector.
absl::StatusOr<SelectLimits> LimitsOf(const StepBatch& batch, const StepShape& shape, int64_t group,
                                      const kernels::PagedKv& kv);

// Device memory for any of the step's Select calls.
int64_t SelectWorkspaceBytes(const StepShape& shape, const SelectLimits& limits,
                             const kernels::PagedKv& kv);

struct SelectMemory {
  std::byte* workspace = nullptr;      // SelectWorkspaceBytes
  kernels::TensorView placed_queries;  // like q, with params.device_rope: to work with
};

// Judges reuse for, selects and prunes the rows of blocks that `served` serves; before pruning,
// with params.device_rope, rows are given their positions. Spans of the params are device memory.
absl::Status SelectOnGpu(const ServedSelector& served, const SelectLimits& limits,
                         const kernels::SelectParams& params, const kernels::PageSelection& rows,
                         const SelectMemory& memory, cudaStream_t stream);

}  // namespace kvasir::worker
