// One CTA a row. Each thread has some consecutive entries: it counts their tokens, the counts are
// summed over the threads before it, and it writes its entries' positions.
#include "kernels/base/block_sums.cuh"
#include "kernels/base/cuda_status.h"
#include "kernels/base/overlapped_launch.h"
#include "kernels/paged/compact_positions_cuda.h"

namespace kvasir::kernels {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    AssignPositionsKernel(const __grid_constant__ PageSelection selection) {
  __shared__ uint64_t sums[kThreads / kWarpThreads];
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
  SelectionHeader* const header = selection.headers + blockIdx.x;
  SelectionEntry* const list = selection.entries + blockIdx.x * selection.capacity;
  const int count = header->count;
  const int share = (count + kThreads - 1) / kThreads;
  const int begin = min(count, static_cast<int>(threadIdx.x) * share);
  const int end = min(count, begin + share);
  int own = 0;
  for (int i = begin; i < end; ++i) own += CountBits(list[i].chosen);
  int64_t position = header->sink_end +
                     static_cast<int64_t>(SumBefore<uint64_t>(static_cast<uint64_t>(own), sums));
  for (int i = begin; i < end; ++i) {
    list[i].pos0 = static_cast<int32_t>(position);
    position += CountBits(list[i].chosen);
  }
  if (threadIdx.x == kThreads - 1) header->compact_length = position;
}

}  // namespace

absl::Status AssignPositions(const PageSelection& selection, cudaStream_t stream) {
  if (selection.num_rows == 0) return absl::OkStatus();
  return CudaStatus(
      LaunchOverlapped(AssignPositionsKernel, static_cast<unsigned>(selection.num_rows), kThreads,
                       0, stream, selection),
      "launching compact_positions");
}

}  // namespace kvasir::kernels
