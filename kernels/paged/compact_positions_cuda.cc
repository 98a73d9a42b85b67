#include "kernels/paged/compact_positions_cuda.h"

#include "kernels/base/cuda_status.h"
#include "kernels/paged/compact_positions_launch.h"

namespace kvasir::kernels {

absl::Status AssignPositions(const PageSelection& selection, cudaStream_t stream) {
  if (selection.num_rows == 0) return absl::OkStatus();
  return CudaStatus(LaunchAssignPositions(selection, stream), "launching compact_positions");
}

}  // namespace kvasir::kernels
