// A CTA takes one query of a query tile, with all its heads.
#include "kernels/base/overlapped_launch.h"
#include "kernels/sparse/common/distant_queries_launch.h"
#include "kernels/sparse/common/select_row.cuh"

namespace kvasir::kernels {
namespace {

constexpr int kThreads = 256;

template <typename T>
__global__ void __launch_bounds__(kThreads)
    DistantQueriesKernel(const __grid_constant__ DistantQueriesLaunch p) {
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
  const QueryBlock block = p.select.blocks[blockIdx.x];
  const int64_t r = blockIdx.y;
  if (r >= block.num_rows) return;
  const SelectionNumbers& numbers = p.select.numbers[blockIdx.x];
  const int64_t distance =
      numbers.window_tokens - p.distance.within_window + (p.distance.of_own_window ? r : 0);
  const KvLayout& layout = p.select.kv.layout;
  const auto half = static_cast<int>(layout.head_dim / 2);
  const auto heads = static_cast<int>(layout.num_kv_heads * p.select.group);
  const int64_t first = (block.first_row + r) * heads * layout.head_dim;
  const T* const from = static_cast<const T*>(p.select.q) + first;
  T* const to = static_cast<T*>(p.to) + first;
  const RotationAt at(p.select.rope, half, distance);
  for (int i = static_cast<int>(threadIdx.x); i < heads * half; i += kThreads) {
    const int element = i % half;
    const int low = i / half * 2 * half + element;
    const float2 turned =
        at.Rotate(element, static_cast<float>(from[low]), static_cast<float>(from[low + half]));
    to[low] = T(turned.x * p.select.rope.attention_scaling);
    to[low + half] = T(turned.y * p.select.rope.attention_scaling);
  }
}

}  // namespace

cudaError_t LaunchDistantQueries(const DistantQueriesLaunch& p, cudaStream_t stream) {
  const dim3 blocks(static_cast<unsigned>(p.num_blocks), static_cast<unsigned>(p.most_rows));
  const auto kernel = p.select.q_dtype == DType::kFloat32 ? DistantQueriesKernel<float>
                                                          : DistantQueriesKernel<BFloat16>;
  return LaunchOverlapped(kernel, blocks, kThreads, 0, stream, p);
}

}  // namespace kvasir::kernels
