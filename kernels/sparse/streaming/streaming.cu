// Each thread takes one row.
#include "kernels/base/overlapped_launch.h"
#include "kernels/sparse/common/select_row.cuh"
#include "kernels/sparse/streaming/streaming_launch.h"

namespace kvasir::kernels {
namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads)
    StreamingKernel(const __grid_constant__ SelectLaunch p) {
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
  const uint32_t index = blockIdx.x * kThreads + threadIdx.x;
  if (index >= p.out.num_rows) return;
  DeviceRow row(p, index);
  row.numbers.budget_tokens = 0;
  p.out.headers[index] = MakeHeader(row.block, row.numbers);
}

}  // namespace

cudaError_t LaunchStreaming(const SelectLaunch& p, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((p.out.num_rows + kThreads - 1) / kThreads);
  return LaunchOverlapped(StreamingKernel, blocks, kThreads, 0, stream, p);
}

}  // namespace kvasir::kernels
