// Counts what selections name. A warp has a row, and its lanes take the row's items in turn.
#include "kernels/base/cuda_status.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/paged/count_selected.cuh"
#include "kernels/paged/count_selected_cuda.h"

namespace kvasir::kernels {
namespace {

constexpr int kRowsOfBlock = 4;

struct CountLaunch {
  const QueryTile* tiles;
  PageSelection selection;  // at least one row
  int64_t num_kv_heads;
  SelectedCounts* counts;  // [num_rows]
};

__global__ void CountSelectedKernel(const __grid_constant__ CountLaunch p) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRowsOfBlock + threadIdx.x / kWarpThreads;
  if (row >= p.selection.num_rows) return;
  p.counts[row].unread_pages = 0;
  CountRow(p.selection.headers[row], p.selection.entries + row * p.selection.capacity,
           p.tiles[row / p.num_kv_heads], p.counts[row]);
}

cudaError_t Launch(const CountLaunch& p, cudaStream_t stream) {
  const auto blocks =
      static_cast<unsigned>((p.selection.num_rows + kRowsOfBlock - 1) / kRowsOfBlock);
  CountSelectedKernel<<<blocks, kRowsOfBlock * kWarpThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

absl::Status CountSelected(std::span<const QueryTile> tiles, const PageSelection& selection,
                           std::span<SelectedCounts> counts, cudaStream_t stream) {
  const int64_t rows = selection.num_rows;
  const int64_t num_tiles = std::ssize(tiles);
  ShapeCheck check("count_selected");
  check.Require(num_tiles > 0 ? rows % num_tiles == 0 : rows == 0, "rows must be tiles x heads")
      .Require(std::ssize(counts) == rows, "counts must be one per row");
  KVASIR_RETURN_IF_ERROR(check.status());
  if (rows == 0) return absl::OkStatus();
  const CountLaunch launch = {.tiles = tiles.data(),
                              .selection = selection,
                              .num_kv_heads = rows / num_tiles,
                              .counts = counts.data()};
  return CudaStatus(Launch(launch, stream), "launching count_selected");
}

}  // namespace kvasir::kernels
