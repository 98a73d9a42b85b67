// Selection on the GPU: calls of a policy's stages (kernels/sparse/common/cuda_selector.h) over as
// many query tiles as their working memory has room for. It knows no method by name. Called by
// CudaAttention, with policies that CheckCudaPolicies has passed. Functions without state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cuda_runtime_api.h>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/paged/page_selection.h"
#include "kernels/sparse/common/cuda_selector.h"
#include "kernels/sparse/common/stages.h"
#include "proto/kvasir/v1/sparsity.pb.h"
#include "worker/backend/cuda/step_table.h"
#include "worker/batch/step_batch.h"

namespace kvasir::worker {

// Makes the policy's stages from the table of methods (kernels/sparse/methods_cuda.h). Errors:
// those of the methods.
absl::StatusOr<kernels::CudaStages> MakeCudaStages(const v1::AttentionPolicy& policy);

// Upper limits over all rows and layers of a step.
struct SelectLimits {
  kernels::SelectBounds select;
  int64_t positions = 0;       // where keys are cached un-rotated: positions they are read at
  int64_t heads_of_layer = 0;  // KV heads of all ranks
};

// INVALID_ARGUMENT where a row's window is too small for its selector.
absl::StatusOr<SelectLimits> LimitsOf(const StepBatch& batch, const StepShape& shape, int64_t group,
                                      const kernels::PagedKv& kv);

// Bytes of device memory that any of the step's Select calls needs at most.
int64_t SelectWorkspaceBytes(const StepShape& shape, const SelectLimits& limits,
                             const kernels::PagedKv& kv);

struct SelectWorkspace {
  std::byte* workspace = nullptr;      // SelectWorkspaceBytes
  kernels::TensorView placed_queries;  // scratch like q, used with params.device_rope
};

// Judges reuse, selects and prunes for the rows of query tiles that `served` serves. With
// params.device_rope, rows are given their positions before pruning. Spans of the params are device
// memory.
absl::Status SelectOnGpu(const ServedSelector& served, const SelectLimits& limits,
                         const kernels::CudaSelectParams& params,
                         const kernels::PageSelection& rows, const SelectWorkspace& memory,
                         cudaStream_t stream);

}  // namespace kvasir::worker
