// A warp takes four pages of a row at a time; each lane takes the same few elements of their
// bounds. The tile's queries, split by sign, come through shared memory in groups of kTileQueries.
// Rows of many queries are served by page_products.cu, and rows of one query mostly by kernels that
// also choose (page_stream.cuh).
#include <algorithm>

#include "kernels/base/head_dim.h"
#include "kernels/base/overlapped_launch.h"
#include "kernels/sparse/common/ranking.h"
#include "kernels/sparse/page_scores/page_row.cuh"
#include "kernels/sparse/page_scores/quest_rule.h"

namespace kvasir::kernels {
namespace {

constexpr int kScoreWarps = 8;
constexpr int kPagesOfWarp = 4;
constexpr int kPagesOfBlock = kScoreWarps * kPagesOfWarp;
constexpr int kTileQueries = 16;
// CTAs that score, all rows together: several for each multiprocessor of any GPU.
constexpr int64_t kScoreBlocks = 2048;

// Loads the queries [first, first + count) of the row: for min, then for max.
template <int kHeadDim>
__device__ void LoadQueries(const PageScoreLaunch& p, const DeviceRow& row, int first, int count,
                            float (*to)[2 * kHeadDim]) {
  const int group = static_cast<int>(p.select.group);
  const int stride = static_cast<int>(p.query_stride);
  for (int i = static_cast<int>(threadIdx.x); i < count * kHeadDim; i += blockDim.x) {
    const int query = first + i / kHeadDim;
    const int begin = query / group * stride;
    const int end = min(begin + stride, static_cast<int>(row.tile.num_rows));
    const float x = MeanElement(p.select, row, begin, end, query % group, i % kHeadDim);
    to[i / kHeadDim][i % kHeadDim] = ForMin(x, p.low_weight);
    to[i / kHeadDim][kHeadDim + i % kHeadDim] = ForMax(x, p.low_weight);
  }
}

// Adjacent elements of bounds and queries that one lane takes, so that a warp reads contiguous
// memory.
constexpr int kSideBySide = 4;

template <typename T>
struct alignas(sizeof(T) * kSideBySide) Part {
  T values[kSideBySide];
};

template <typename T, int kCount>
__device__ void LoadParts(const void* row, int lane, float (&to)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount / kSideBySide; ++i) {
    const auto part = static_cast<const Part<T>*>(row)[i * kWarpThreads + lane];
#pragma unroll
    for (int j = 0; j < kSideBySide; ++j) {
      to[i * kSideBySide + j] = static_cast<float>(part.values[j]);
    }
  }
}

// Pages [pages.begin, pages.end) of one slot's layer and KV head.
struct ScoredRow {
  __device__ ScoredRow(const PageScoreLaunch& p, uint32_t row)
      : at(p.select, row),
        pages(PagesOf(p, at)),
        scores(p.scores + row * p.select.kv.max_blocks_per_slot) {}

  __device__ bool Has(const PageScoreLaunch& p, int64_t page) const {
    return page < pages.end && p.select.kv.extent(at.tile.slot, page) >= 0;
  }

  DeviceRow at;
  PageRange pages;
  uint32_t* scores;
};

// Returns the sum of values[i] over the warp to the lanes [8 i, 8 i + 8).
__device__ float SumOverWarp(const float (&values)[kPagesOfWarp], int lane) {
  static_assert(kPagesOfWarp == 4);
  const bool upper = (lane & 16) != 0;
  float even = upper ? values[2] : values[0];
  float odd = upper ? values[3] : values[1];
  even += __shfl_xor_sync(kAllLanes, upper ? values[0] : values[2], 16);
  odd += __shfl_xor_sync(kAllLanes, upper ? values[1] : values[3], 16);
  const bool takes_odd = (lane & 8) != 0;
  float sum = takes_odd ? odd : even;
  sum += __shfl_xor_sync(kAllLanes, takes_odd ? even : odd, 8);
  for (int distance = 4; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(kAllLanes, sum, distance);
  }
  return sum;
}

template <typename Kv, int kHeadDim>
__global__ void __launch_bounds__(kScoreWarps* kWarpThreads)
    ScoreKernel(const __grid_constant__ PageScoreLaunch p) {
  constexpr int kElements = 2 * kHeadDim / kWarpThreads;
  __shared__ alignas(16) float queries[kTileQueries][2 * kHeadDim];
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
  const ScoredRow row(p, blockIdx.x);
  if (row.pages.size() <= 0) return;
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int warp = static_cast<int>(threadIdx.x) / kWarpThreads;
  const auto stride = static_cast<int>(p.query_stride);
  const int num_means = (static_cast<int>(row.at.tile.num_rows) + stride - 1) / stride;
  const int num_queries = num_means * static_cast<int>(p.select.group);
  bool is_loaded = false;
  for (int64_t first = row.pages.begin + int64_t{blockIdx.y} * kPagesOfBlock; first < row.pages.end;
       first += int64_t{gridDim.y} * kPagesOfBlock) {
    const int64_t page = first + warp * kPagesOfWarp;
    const int64_t own_page = page + lane / (kWarpThreads / kPagesOfWarp);
    float bounds[kPagesOfWarp][kElements];
    float best = -INFINITY;  // of own_page
#pragma unroll
    for (int i = 0; i < kPagesOfWarp; ++i) {
      for (float& element : bounds[i]) element = 0;
      if (!row.Has(p, page + i)) continue;
      LoadParts<Kv>(p.select.kv.Bounds(row.at.tile.slot, page + i, p.select.layer, row.at.kv_head),
                    lane, bounds[i]);
    }
    for (int tile = 0; tile < num_queries; tile += kTileQueries) {
      const int count = min(kTileQueries, num_queries - tile);
      if (!is_loaded) {
        __syncthreads();  // the previous queries have been read
        LoadQueries<kHeadDim>(p, row.at, tile, count, queries);
        __syncthreads();
        is_loaded = num_queries <= kTileQueries;
      }
#pragma unroll 1
      for (int query = 0; query < count; ++query) {
        float q[kElements];
        LoadParts<float>(queries[query], lane, q);
        float sums[kPagesOfWarp] = {};
#pragma unroll
        for (int i = 0; i < kPagesOfWarp; ++i) {
#pragma unroll
          for (int j = 0; j < kElements; ++j) sums[i] += q[j] * bounds[i][j];
        }
        const float sum = SumOverWarp(sums, lane);
        best = sum > best ? sum : best;  // ignores NaN
      }
    }
    if (lane % (kWarpThreads / kPagesOfWarp) == 0 && own_page < row.pages.end) {
      row.scores[own_page - row.pages.begin] =
          OrderedScore(row.Has(p, own_page) ? best : -INFINITY);
    }
  }
}

template <typename Kv, int kHeadDim>
cudaError_t Launch(const PageScoreLaunch& p, cudaStream_t stream) {
  const int64_t rows = p.select.out.num_rows;
  const int64_t useful = (p.select.kv.max_blocks_per_slot + kPagesOfBlock - 1) / kPagesOfBlock;
  const int64_t share = std::max<int64_t>(1, kScoreBlocks / rows);
  const dim3 blocks(static_cast<unsigned>(rows), static_cast<unsigned>(std::min(useful, share)));
  return LaunchOverlapped(ScoreKernel<Kv, kHeadDim>, blocks, kScoreWarps * kWarpThreads, 0, stream,
                          p);
}

template <typename Kv>
cudaError_t Launch(const PageScoreLaunch& p, cudaStream_t stream) {
  return ForHeadDim(p.select.kv.layout.head_dim,
                    [&]<int kHeadDim>() { return Launch<Kv, kHeadDim>(p, stream); });
}

}  // namespace

cudaError_t LaunchPageScores(const PageScoreLaunch& p, cudaStream_t stream) {
  if (p.plan.by_products) return LaunchPageProducts(p, stream);
  return p.select.kv.layout.dtype == DType::kFloat32 ? Launch<float>(p, stream)
                                                     : Launch<BFloat16>(p, stream);
}

}  // namespace kvasir::kernels
