#include <cstdint>

#include "tests/bench/cuda_timing.h"
#include "tests/bench/device_read_speed.h"

namespace kvasir::kernels {
namespace {

constexpr int64_t kBytes = int64_t{2} << 30;
constexpr int kThreads = 512;
constexpr int kBlocksOfMultiprocessor = 4;
constexpr int kLoads = 8;  // loads in flight per thread
constexpr int64_t kTile = int64_t{kThreads} * kLoads;
static_assert(kBytes % (kTile * sizeof(uint4)) == 0);

__global__ void __launch_bounds__(kThreads, kBlocksOfMultiprocessor)
    ReadAll(const uint4* data, int64_t num_tiles, uint32_t* never) {
  uint32_t all = 0;
  for (int64_t tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
    const uint4* const from = data + tile * kTile + threadIdx.x;
    uint4 loaded[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) loaded[i] = __ldcs(from + i * kThreads);
#pragma unroll
    for (const uint4& words : loaded) all ^= words.x ^ words.y ^ words.z ^ words.w;
  }
  if (all == 1) *never = all;  // never true, as the data are zeros; keeps the loads
}

}  // namespace

double DeviceReadBytesPerSecond() {
  const DeviceBuffer data = Value(DeviceBuffer::Allocate(kBytes));
  const DeviceBuffer never = Value(DeviceBuffer::Allocate(sizeof(uint32_t)));
  Check(cudaMemset(data.data(), 0, static_cast<size_t>(kBytes)));
  int device = 0, multiprocessors = 0;
  Check(cudaGetDevice(&device));
  Check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  const double microseconds = MedianMicroseconds([&](cudaStream_t stream) {
    ReadAll<<<multiprocessors * kBlocksOfMultiprocessor, kThreads, 0, stream>>>(
        data.As<const uint4>(), kBytes / static_cast<int64_t>(kTile * sizeof(uint4)),
        never.As<uint32_t>());
    Check(cudaGetLastError());
  });
  return 1e6 * static_cast<double>(kBytes) / microseconds;
}

}  // namespace kvasir::kernels
