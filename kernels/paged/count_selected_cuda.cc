#include "kernels/paged/count_selected_cuda.h"

#include "kernels/base/cuda_status.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/paged/count_selected_launch.h"

namespace kvasir::kernels {

absl::Status CountSelected(std::span<const QueryBlock> blocks, const PageSelection& selection,
                           std::span<SelectedCounts> counts, cudaStream_t stream) {
  const int64_t rows = selection.num_rows;
  const int64_t num_blocks = std::ssize(blocks);
  ShapeCheck check("count_selected");
  check.Require(num_blocks > 0 ? rows % num_blocks == 0 : rows == 0, "rows must be blocks x heads")
      .Require(std::ssize(counts) == rows, "counts must be one per row");
  KVASIR_RETURN_IF_ERROR(check.status());
  if (rows == 0) return absl::OkStatus();
  const CountLaunch launch = {.blocks = blocks.data(),
                              .selection = selection,
                              .num_kv_heads = rows / num_blocks,
                              .counts = counts.data()};
  return CudaStatus(LaunchCountSelected(launch, stream), "launching count_selected");
}

}  // namespace kvasir::kernels
