#include <algorithm>

#include "kernels/base/overlapped_launch.h"
#include "kernels/gemm/gemm_add.h"

namespace kvasir::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostBlocks = 1056;
constexpr int kRunBytes = 16;

template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) Run {
  T values[kCount];
};

template <typename T, int kCount>
__global__ void AddRowsKernel(const AddRowsLaunch p) {
  using Elements = Run<T, kCount>;
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
  const auto* const x = static_cast<const Elements*>(p.x);
  auto* const y = static_cast<Elements*>(p.y);
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < p.count / kCount;
       i += stride) {
    const Elements added = x[i];
    Elements sum = y[i];
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      sum.values[j] = T(static_cast<float>(sum.values[j]) + static_cast<float>(added.values[j]));
    }
    y[i] = sum;
  }
}

template <typename T, int kCount>
cudaError_t Launch(const AddRowsLaunch& p, cudaStream_t stream) {
  const int64_t blocks = std::min((p.count / kCount + kThreads - 1) / kThreads, kMostBlocks);
  return LaunchOverlapped(AddRowsKernel<T, kCount>, static_cast<unsigned>(blocks), kThreads, 0,
                          stream, p);
}

template <typename T>
cudaError_t LaunchRuns(const AddRowsLaunch& p, cudaStream_t stream) {
  constexpr int kCount = kRunBytes / static_cast<int>(sizeof(T));
  const auto is_aligned = [](const void* memory) {
    return reinterpret_cast<uintptr_t>(memory) % kRunBytes == 0;
  };
  const bool in_runs = p.count % kCount == 0 && is_aligned(p.x) && is_aligned(p.y);
  return in_runs ? Launch<T, kCount>(p, stream) : Launch<T, 1>(p, stream);
}

}  // namespace

cudaError_t LaunchAddRows(const AddRowsLaunch& params, cudaStream_t stream) {
  if (params.count == 0) return cudaSuccess;
  return params.dtype == DType::kFloat32 ? LaunchRuns<float>(params, stream)
                                         : LaunchRuns<BFloat16>(params, stream);
}

}  // namespace kvasir::kernels
