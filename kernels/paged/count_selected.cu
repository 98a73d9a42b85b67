// Counting what selections name. A warp takes a row, its lanes the items of the row in turn.
#include "kernels/attention/row_items.h"
#include "kernels/base/warp.cuh"
#include "kernels/paged/count_selected_launch.h"

namespace kvasir::kernels {
namespace {

constexpr int kRowsOfBlock = 4;

__device__ SelectedCounts SumOverWarp(SelectedCounts counts) {
  for (int distance = kWarpThreads / 2; distance > 0; distance /= 2) {
    counts.pages += __shfl_xor_sync(kAllLanes, counts.pages, distance);
    counts.tokens += __shfl_xor_sync(kAllLanes, counts.tokens, distance);
    counts.pruned_pages += __shfl_xor_sync(kAllLanes, counts.pruned_pages, distance);
  }
  return counts;
}

__global__ void CountSelectedKernel(const __grid_constant__ CountLaunch p) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRowsOfBlock + threadIdx.x / kWarpThreads;
  if (row >= p.selection.num_rows) return;
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const QueryBlock block = p.blocks[row / p.num_kv_heads];
  const SelectionHeader header = p.selection.headers[row];
  const SelectionEntry* list = p.selection.entries + row * p.selection.capacity;
  const RowItems items = NumberItems(header, block.first_position + block.num_rows - 1);
  SelectedCounts counts;
  if (header.kind == SelectionHeader::Kind::kAll) {
    if (lane == 0) {
      counts = {.pages = static_cast<int32_t>(items.num_items),
                .tokens = static_cast<int32_t>(items.last_position + 1)};
    }
  } else {
    for (int64_t i = lane; i < items.num_items; i += kWarpThreads) {
      const RowItem item = FindItem(items, header, list, i);
      if (item.mask == 0) continue;
      counts.tokens += __popcll(item.mask);
      counts.pages += IsAnotherPage(items, header, list, i) ? 1 : 0;
    }
    for (int32_t i = lane; i < header.count; i += kWarpThreads) {
      counts.pruned_pages += IsPrunedPage(header, list[i]) ? 1 : 0;
    }
  }
  counts = SumOverWarp(counts);
  counts.is_list = header.kind == SelectionHeader::Kind::kList ? 1 : 0;
  counts.reused_stages = header.reused_stages;
  if (lane == 0) p.counts[row] = counts;
}

}  // namespace

cudaError_t LaunchCountSelected(const CountLaunch& p, cudaStream_t stream) {
  const auto blocks =
      static_cast<unsigned>((p.selection.num_rows + kRowsOfBlock - 1) / kRowsOfBlock);
  CountSelectedKernel<<<blocks, kRowsOfBlock * kWarpThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace kvasir::kernels
