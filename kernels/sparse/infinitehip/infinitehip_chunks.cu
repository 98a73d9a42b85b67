// The scores of infinitehip's first stage in chunk-indexed layers. Bounds cannot be rotated, so
// each chunk has queries of its own. A warp takes a chunk, each lane some pairs of elements. The
// tile's averaged queries come through shared memory, kTileQueries at a time, and are rotated in
// registers.
#include <algorithm>

#include "kernels/base/head_dim.h"
#include "kernels/base/overlapped_launch.h"
#include "kernels/sparse/common/ranking.h"
#include "kernels/sparse/infinitehip/infinitehip_launch.h"
#include "kernels/sparse/reuse/reuse_row.cuh"

namespace kvasir::kernels {
namespace {

constexpr int kWarps = 8;
constexpr int kTileQueries = 16;
// CTAs of all rows together: the number that runs at once on any GPU.
constexpr int64_t kScoreBlocks = 512;

// Loads the averaged queries [first, first + count) of the row.
template <int kHeadDim>
__device__ void LoadMeans(const InfiniteHipLaunch& p, const DeviceRow& row, int first, int count,
                          float (*to)[kHeadDim]) {
  const int group = static_cast<int>(p.select.group);
  const auto stride = static_cast<int>(p.stages[0].query_stride);
  for (int i = static_cast<int>(threadIdx.x); i < count * kHeadDim; i += blockDim.x) {
    const int query = first + i / kHeadDim;
    const int begin = query / group * stride;
    const int end = min(begin + stride, static_cast<int>(row.tile.num_rows));
    to[i / kHeadDim][i % kHeadDim] =
        MeanElement(p.select, row, begin, end, query % group, i % kHeadDim);
  }
}

// The lane's elements of a page's bounds, or of their factors: pairs half a head apart.
template <int kHeadDim>
struct Pairs {
  static constexpr int kCount = kHeadDim / 2 / kWarpThreads;
  float low[kCount];
  float high[kCount];
};

template <typename Kv, int kHeadDim>
__device__ Pairs<kHeadDim> LoadBound(const std::byte* bound, int lane) {
  Pairs<kHeadDim> pairs;
#pragma unroll
  for (int k = 0; k < Pairs<kHeadDim>::kCount; ++k) {
    pairs.low[k] = LoadElement<Kv>(bound, lane + k * kWarpThreads);
    pairs.high[k] = LoadElement<Kv>(bound, lane + k * kWarpThreads + kHeadDim / 2);
  }
  return pairs;
}

// Returns min(q, 0) times the least plus max(q, 0) times the greatest element. NaN stays in both.
__device__ inline float BoundOf(float q, float least, float greatest) {
  return (q > 0 ? 0.0f : q) * least + (q < 0 ? 0.0f : q) * greatest;
}

// Raises `best` to the bounds of a page's logits, for `count` queries rotated by the cosines (low)
// and sines (high) of `turn`.
template <int kHeadDim>
__device__ void RaiseByPage(const Pairs<kHeadDim>& least, const Pairs<kHeadDim>& greatest,
                            const Pairs<kHeadDim>& turn, const float (*queries)[kHeadDim],
                            int count, int lane, float& best) {
#pragma unroll 1
  for (int query = 0; query < count; ++query) {
    float sum = 0;
#pragma unroll
    for (int k = 0; k < Pairs<kHeadDim>::kCount; ++k) {
      const float x = queries[query][lane + k * kWarpThreads];
      const float y = queries[query][lane + k * kWarpThreads + kHeadDim / 2];
      sum += BoundOf(x * turn.low[k] - y * turn.high[k], least.low[k], greatest.low[k]);
      sum += BoundOf(y * turn.low[k] + x * turn.high[k], least.high[k], greatest.high[k]);
    }
    for (int distance = kWarpThreads / 2; distance > 0; distance /= 2) {
      sum += __shfl_xor_sync(kAllLanes, sum, distance);
    }
    best = sum > best ? sum : best;  // ignores NaN
  }
}

template <int kHeadDim>
__device__ Pairs<kHeadDim> LoadTurn(const DeviceRopePositions& rope, int64_t distance, int lane) {
  const RotationAt at(rope, kHeadDim / 2, distance);
  Pairs<kHeadDim> turn;
#pragma unroll
  for (int k = 0; k < Pairs<kHeadDim>::kCount; ++k) {
    turn.low[k] = at.cos[lane + k * kWarpThreads] * rope.attention_scaling;
    turn.high[k] = at.sin[lane + k * kWarpThreads] * rope.attention_scaling;
  }
  return turn;
}

template <typename Kv, int kHeadDim>
__global__ void __launch_bounds__(kWarps* kWarpThreads, 1)
    ChunkKernel(const __grid_constant__ InfiniteHipLaunch p) {
  __shared__ float queries[kTileQueries][kHeadDim];
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
  const DeviceRow row(p.select, blockIdx.x);
  if (!Runs(p.select, row, 0)) return;
  const SelectionHeader header = MakeHeader(row.tile, row.numbers);
  const ChunkGrid& chunks = p.pages.chunks;
  const int64_t n = chunks.Count(header, row.numbers);
  if (n <= chunks.Kept(row.numbers)) return;
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const auto stride = static_cast<int>(p.stages[0].query_stride);
  const int num_means = (static_cast<int>(row.tile.num_rows) + stride - 1) / stride;
  const int num_queries = num_means * static_cast<int>(p.select.group);
  const PagedKv& kv = p.select.kv;
  bool is_loaded = false;
  for (int64_t first = int64_t{blockIdx.y} * kWarps; first < n;
       first += int64_t{gridDim.y} * kWarps) {
    const int64_t chunk = first + threadIdx.x / kWarpThreads;
    const bool exists = chunk < n;
    const int64_t begin = header.sink_end + chunk * chunks.chunk_tokens;
    const int64_t end_page = exists ? CeilPages(begin + chunks.chunk_tokens) : 0;
    Pairs<kHeadDim> turn = {};
    if (exists) {
      turn = LoadTurn<kHeadDim>(p.select.rope, n - 1 + p.LeastDistance(row.numbers) - chunk, lane);
    }
    float best = -INFINITY;
    for (int tile = 0; tile < num_queries; tile += kTileQueries) {
      const int count = min(kTileQueries, num_queries - tile);
      if (!is_loaded) {
        __syncthreads();  // the previous queries have been read
        LoadMeans<kHeadDim>(p, row, tile, count, queries);
        __syncthreads();
        is_loaded = num_queries <= kTileQueries;
      }
#pragma unroll 1
      for (int64_t page = begin / kPageTokens; page < end_page; ++page) {
        if (kv.extent(row.tile.slot, page) < 0) continue;
        const std::byte* bounds = kv.Bounds(row.tile.slot, page, p.select.layer, row.kv_head);
        RaiseByPage<kHeadDim>(LoadBound<Kv, kHeadDim>(bounds, lane),
                              LoadBound<Kv, kHeadDim>(bounds + kv.layout.element_row_bytes(), lane), turn,
                              queries, count, lane, best);
      }
    }
    if (exists && lane == 0) p.chunk_scores[row.index * p.max_chunks + chunk] = OrderedScore(best);
  }
}

template <typename Kv, int kHeadDim>
cudaError_t Launch(const InfiniteHipLaunch& p, cudaStream_t stream) {
  const int64_t rows = p.select.out.num_rows;
  const int64_t useful = (p.max_chunks + kWarps - 1) / kWarps;
  const int64_t share = std::max<int64_t>(1, kScoreBlocks / rows);
  const dim3 blocks(static_cast<unsigned>(rows), static_cast<unsigned>(std::min(useful, share)));
  return LaunchOverlapped(ChunkKernel<Kv, kHeadDim>, blocks, kWarps * kWarpThreads, 0, stream, p);
}

template <typename Kv>
cudaError_t Launch(const InfiniteHipLaunch& p, cudaStream_t stream) {
  return ForHeadDim(p.select.kv.layout.head_dim,
                    [&]<int kHeadDim>() { return Launch<Kv, kHeadDim>(p, stream); });
}

}  // namespace

cudaError_t LaunchChunkIndexedScores(const InfiniteHipLaunch& p, cudaStream_t stream) {
  return p.select.kv.layout.dtype == DType::kFloat32 ? Launch<float>(p, stream)
                                                     : Launch<BFloat16>(p, stream);
}

}  // namespace kvasir::kernels
