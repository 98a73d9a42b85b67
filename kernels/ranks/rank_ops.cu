// Adds sums that a library made, and places what it gathered side by side.
#include "kernels/ranks/rank_ops_launch.h"

namespace kvasir::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostBlocks = 1024;  // CTAs; each takes further elements in turn

__device__ void CountUp(uint32_t* progress) {
  volatile uint32_t* const count = progress;
  if (blockIdx.x == 0 && threadIdx.x == 0) *count = *count + 1;
}

__global__ void AddKernel(const __grid_constant__ AddLaunch p) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < p.count;
       i += stride) {
    p.y[i] = BFloat16(static_cast<float>(p.y[i]) + static_cast<float>(BFloat16(p.x[i])));
  }
  CountUp(p.progress);
}

template <typename Element>
__global__ void PlaceKernel(const __grid_constant__ PlaceLaunch p) {
  const auto* const gathered = static_cast<const Element*>(p.gathered);
  auto* const y = static_cast<Element*>(p.y);
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
       i < p.rows * p.columns; i += stride) {
    const int64_t row = i / p.columns, column = i % p.columns;
    const int64_t part = column / p.width;
    const int64_t left = p.columns - part * p.width;
    const int64_t width = left < p.width ? left : p.width;
    const int64_t rank_begin = (p.first_rank + part) * p.rows * p.width;
    y[i] = gathered[rank_begin + row * width + column % p.width];
  }
  CountUp(p.progress);
}

unsigned BlocksFor(int64_t count) {
  const int64_t blocks = (count + kThreads - 1) / kThreads;
  return static_cast<unsigned>(blocks < kMostBlocks ? blocks : kMostBlocks);
}

}  // namespace

cudaError_t LaunchAdd(const AddLaunch& p, cudaStream_t stream) {
  AddKernel<<<BlocksFor(p.count), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t LaunchPlace(const PlaceLaunch& p, cudaStream_t stream) {
  const unsigned blocks = BlocksFor(p.rows * p.columns);
  if (p.element_bytes == 4) {
    PlaceKernel<uint32_t><<<blocks, kThreads, 0, stream>>>(p);
  } else {
    PlaceKernel<uint16_t><<<blocks, kThreads, 0, stream>>>(p);
  }
  return cudaGetLastError();
}

}  // namespace kvasir::kernels
