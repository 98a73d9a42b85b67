// Counts what selections name. A warp has a row, and its lanes take the row's items in turn.
#include "kernels/paged/count_selected.cuh"
#include "kernels/paged/count_selected_launch.h"

namespace kvasir::kernels {
namespace {

constexpr int kRowsOfBlock = 4;

__global__ void CountSelectedKernel(const __grid_constant__ CountLaunch p) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRowsOfBlock + threadIdx.x / kWarpThreads;
  if (row >= p.selection.num_rows) return;
  p.counts[row].unread_pages = 0;
  CountRow(p.selection.headers[row], p.selection.entries + row * p.selection.capacity,
           p.blocks[row / p.num_kv_heads], p.counts[row]);
}

}  // namespace

cudaError_t LaunchCountSelected(const CountLaunch& p, cudaStream_t stream) {
  const auto blocks =
      static_cast<unsigned>((p.selection.num_rows + kRowsOfBlock - 1) / kRowsOfBlock);
  CountSelectedKernel<<<blocks, kRowsOfBlock * kWarpThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace kvasir::kernels
