// Each thread takes one row.
#include "kernels/base/overlapped_launch.h"
#include "kernels/sparse/common/select_row.cuh"
#include "tests/kernels/sparse/newest/newest_cuda.h"

namespace kvasir::kernels {
namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads) NewestKernel(const __grid_constant__ SelectLaunch p) {
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
  const uint32_t index = blockIdx.x * kThreads + threadIdx.x;
  if (index >= p.out.num_rows) return;
  const DeviceRow row(p, index);
  SelectionHeader header = MakeHeader(row.tile, row.numbers);
  const PageRange candidates = CandidatePages(header, row.numbers);
  const int64_t count = min(CeilPages(row.numbers.budget_tokens), candidates.size());
  for (int64_t i = 0; i < count; ++i) {
    SelectionEntry entry = {};
    entry.page = candidates.end - count + i;
    entry.chosen = entry.live = ~uint64_t{0};
    entry.score = static_cast<float>(i);
    p.out.entries[index * p.out.capacity + i] = entry;
  }
  header.count = static_cast<int32_t>(count);
  p.out.headers[index] = header;
}

}  // namespace

cudaError_t LaunchNewest(const SelectLaunch& p, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((p.out.num_rows + kThreads - 1) / kThreads);
  return LaunchOverlapped(NewestKernel, blocks, kThreads, 0, stream, p);
}

}  // namespace kvasir::kernels
