// A CTA takes one query of a query tile, with all its heads.
#include "kernels/base/cuda_status.h"
#include "kernels/base/overlapped_launch.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/sparse/common/distant_queries_cuda.h"
#include "kernels/sparse/common/select_cuda.h"
#include "kernels/sparse/common/select_row.cuh"

namespace kvasir::kernels {
namespace {

constexpr int kThreads = 256;

struct DistantQueriesLaunch {
  SelectLaunch select = {};
  int64_t num_tiles = 0;
  int64_t most_rows = 0;  // queries of a query tile
  QueryDistance distance = {};
  void* to = nullptr;  // of the shape and dtype of select.q
};

template <typename T>
__global__ void __launch_bounds__(kThreads)
    DistantQueriesKernel(const __grid_constant__ DistantQueriesLaunch p) {
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
  const QueryTile tile = p.select.tiles[blockIdx.x];
  const int64_t r = blockIdx.y;
  if (r >= tile.num_rows) return;
  const PolicyNumbers& numbers = p.select.numbers[blockIdx.x];
  const int64_t distance =
      numbers.window_tokens - p.distance.within_window + (p.distance.of_own_window ? r : 0);
  const KvLayout& layout = p.select.kv.layout;
  const auto half = static_cast<int>(layout.head_dim / 2);
  const auto heads = static_cast<int>(layout.num_kv_heads * p.select.group);
  const int64_t first = (tile.first_row + r) * heads * layout.head_dim;
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

cudaError_t LaunchDistantQueries(const DistantQueriesLaunch& p, cudaStream_t stream) {
  const dim3 blocks(static_cast<unsigned>(p.num_tiles), static_cast<unsigned>(p.most_rows));
  const auto kernel = p.select.q_dtype == DType::kFloat32 ? DistantQueriesKernel<float>
                                                          : DistantQueriesKernel<BFloat16>;
  return LaunchOverlapped(kernel, blocks, kThreads, 0, stream, p);
}

}  // namespace

absl::Status RotateToDistance(const CudaSelectParams& p, const QueryDistance& distance,
                              const TensorView& to, cudaStream_t stream) {
  const KvLayout& layout = p.kv.layout;
  ShapeCheck check("distant_queries");
  check.Match("q", p.q, {"tokens", "heads", layout.head_dim})
      .Match("to", to, {"tokens", "heads", layout.head_dim}, p.q.dtype())
      .Require(IsFloat32OrBFloat16(p.q.dtype()), "q must be float32 or bfloat16")
      .Require(p.numbers.size() == p.tiles.size(), "numbers must be one per query tile")
      .Require(p.device_rope.on(), "keys must be cached un-rotated");
  KVASIR_RETURN_IF_ERROR(check.status());
  if (p.tiles.empty()) return absl::OkStatus();
  const DistantQueriesLaunch launch = {.select = {.q = p.q.data(),
                                                  .q_dtype = p.q.dtype(),
                                                  .group = p.q.dim(1) / layout.num_kv_heads,
                                                  .kv = p.kv,
                                                  .tiles = p.tiles.data(),
                                                  .numbers = p.numbers.data(),
                                                  .rope = p.device_rope},
                                       .num_tiles = std::ssize(p.tiles),
                                       .most_rows = p.may_have_several_rows() ? kPageTokens : 1,
                                       .distance = distance,
                                       .to = to.data()};
  return CudaStatus(LaunchDistantQueries(launch, stream), "launching distant_queries");
}

}  // namespace kvasir::kernels
