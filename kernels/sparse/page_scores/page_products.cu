// Scores of pages by a matrix product, [pages, 2 head_dim] by [2 head_dim, queries]
// (quest_score.h), of which only the maximum over the queries is needed. A CTA holds the row's
// queries in shared memory, split by sign. Each of its warpgroups takes 64 pages at a time into
// registers: 32 KB that are read at once. So few queries run at the speed of memory, and many at
// that of tensor cores. Products of bfloat16 are exact, sums are float32.
#include <algorithm>
#include <cuda_bf16.h>
#include <type_traits>

#include "kernels/base/head_dim.h"
#include "kernels/base/multiprocessors.h"
#include "kernels/base/overlapped_launch.h"
#include "kernels/base/wgmma/wgmma.cuh"
#include "kernels/sparse/common/ranking.h"
#include "kernels/sparse/page_scores/page_row.cuh"
#include "kernels/sparse/page_scores/page_tile.cuh"

namespace kvasir::kernels {
namespace {

constexpr int kWarpgroups = 3;
constexpr int kGroupThreads = 128;
constexpr int kThreads = kWarpgroups * kGroupThreads;
constexpr int kTilePages = 64;  // of a warpgroup
constexpr int kBoxColumns = hopper::kSwizzledRowBytes / 2;

// Queries are multiplied kTileQueries at a time; shared memory holds kTiles of these groups.
struct Few {
  static constexpr int kTileQueries = 8;
  static constexpr int kTiles = 2;
};
struct Many {
  static constexpr int kTileQueries = 64;
  static constexpr int kTiles = 4;
};
template <typename Tiling>
constexpr int kPassQueries = Tiling::kTiles* Tiling::kTileQueries;
template <typename Tiling>
constexpr int kBoxBytes = Tiling::kTileQueries* hopper::kSwizzledRowBytes;

// Returns the column of a page's element in the products (page_tile.cuh).
__device__ int ColumnOf(int element) {
  const int within = element % 8;
  return element / 32 * 32 + within / 4 * 16 + within % 4 / 2 * 8 + element % 32 / 8 * 2 +
         within % 2;
}

// The queries of a pass, [tile][box][queries][64 columns], swizzled.
template <int kHeadDim, typename Tiling>
struct Queries {
  static constexpr int kBoxes = 2 * kHeadDim / kBoxColumns;
  std::byte boxes[Tiling::kTiles][kBoxes][kBoxBytes<Tiling>];
};

// Stores elements `element` and `element` + 1 of query `at` of the pass.
template <int kHeadDim, typename Tiling>
__device__ void StorePair(Queries<kHeadDim, Tiling>& to, int at, int element, uint32_t pair) {
  constexpr int kTileQueries = Tiling::kTileQueries;
  const int column = ColumnOf(element);
  std::byte* box = to.boxes[at / kTileQueries][column / kBoxColumns];
  *reinterpret_cast<uint32_t*>(
      box + hopper::SwizzledOffset(at % kTileQueries, column % kBoxColumns * 2)) = pair;
}

// Loads `count` queries of the row from `first` on: for min, then for max. Places after the last
// query repeat it, which changes no maximum.
template <int kHeadDim, typename Tiling>
__device__ void LoadQueries(const SelectLaunch& p, const DeviceRow& row, int first, int count,
                            int last, float low_weight, Queries<kHeadDim, Tiling>& to) {
  const auto group = static_cast<int>(p.group);
  const int64_t heads = p.kv.layout.num_kv_heads * group;
  const auto* queries = static_cast<const __nv_bfloat162*>(p.q);
  for (int i = static_cast<int>(threadIdx.x); i < count * kHeadDim / 2; i += kThreads) {
    const int at = i / (kHeadDim / 2);
    const int element = i % (kHeadDim / 2) * 2;
    const int query = min(first + at, last);
    const int64_t q_row =
        (row.tile.first_row + query / group) * heads + row.kv_head * group + query % group;
    const float2 x = __bfloat1622float2(queries[(q_row * kHeadDim + element) / 2]);
    StorePair(to, at, element, PairForMin(x, low_weight));
    StorePair(to, at, kHeadDim + element, PairForMax(x, low_weight));
  }
  hopper::FenceAsyncProxy();
}

__device__ void Multiply(float (&sums)[4], const uint32_t (&pages)[4], uint64_t queries) {
  hopper::Wgmma64x8(sums, pages, queries);
}
__device__ void Multiply(float (&sums)[32], const uint32_t (&pages)[4], uint64_t queries) {
  hopper::Wgmma64x64<hopper::Major::kK>(sums, pages, queries);
}

// Raises best[i] to the greatest product of page i with a query of the tile that this thread has,
// ignoring NaN.
template <int kHeadDim, int kBox>
__device__ void RaiseByProducts(const PageTile<kHeadDim>& pages, const std::byte (*boxes)[kBox],
                                float (&best)[2]) {
  constexpr int kSums = kBox / hopper::kSwizzledRowBytes / 2;  // of a thread
  float sums[kSums] = {};
  hopper::WgmmaFence();
#pragma unroll
  for (int step = 0; step < PageTile<kHeadDim>::kSteps; ++step) {
    Multiply(sums, pages.at[step],
             hopper::Advance(hopper::TileDescriptor(boxes[step / 4]), step % 4 * 32));
  }
  hopper::WgmmaCommit();
  hopper::WgmmaWait<0>();
#pragma unroll
  for (int i = 0; i < kSums; ++i) best[i / 2 % 2] = fmaxf(best[i / 2 % 2], sums[i]);
}

// Writes the scores of the pages of a warpgroup's tiles for the pass's queries.
template <int kHeadDim, typename Tiling>
__device__ void ScoreTiles(const PageScoreLaunch& p, const DeviceRow& row, const PageRange& pages,
                           const Queries<kHeadDim, Tiling>& queries, int num_tiles,
                           bool is_first_pass) {
  const int thread = static_cast<int>(threadIdx.x) % kGroupThreads;
  const int lane = thread % kWarpThreads;
  const int own = thread / kWarpThreads * 16 + lane / 4;  // of the tile's pages; the other: + 8
  uint32_t* scores = p.scores + row.index * p.select.kv.max_blocks_per_slot;
  const int64_t first = blockIdx.y * kWarpgroups + threadIdx.x / kGroupThreads;
  for (int64_t begin = first * kTilePages; begin < pages.size();
       begin += int64_t{gridDim.y} * kWarpgroups * kTilePages) {
    PageTile<kHeadDim> tile;
    bool exists[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t page = pages.begin + begin + own + 8 * i;
      exists[i] = page < pages.end && p.select.kv.extent(row.tile.slot, page) >= 0;
      tile.Load(exists[i] ? p.select.kv.Bounds(row.tile.slot, page, p.select.layer, row.kv_head)
                          : nullptr,
                i, lane % 4);
    }
    float best[2] = {-INFINITY, -INFINITY};
#pragma unroll 1
    for (int i = 0; i < num_tiles; ++i) RaiseByProducts(tile, queries.boxes[i], best);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      best[i] = fmaxf(best[i], __shfl_xor_sync(kAllLanes, best[i], 1));
      best[i] = fmaxf(best[i], __shfl_xor_sync(kAllLanes, best[i], 2));
      const int64_t at = begin + own + 8 * i;
      if (lane % 4 != 0 || at >= pages.size()) continue;
      const uint32_t score = OrderedScore(exists[i] ? best[i] : -INFINITY);
      scores[at] = is_first_pass ? score : max(scores[at], score);
    }
  }
}

template <int kHeadDim, typename Tiling>
__global__ void __launch_bounds__(kThreads, 1)
    ProductKernel(const __grid_constant__ PageScoreLaunch p) {
  extern __shared__ std::byte raw[];
  auto& queries = *reinterpret_cast<Queries<kHeadDim, Tiling>*>(
      (reinterpret_cast<uintptr_t>(raw) + 1023) / 1024 * 1024);
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
  const DeviceRow row(p.select, blockIdx.x);
  const PageRange pages = PagesOf(p, row);
  const int count = static_cast<int>(row.tile.num_rows * p.select.group);
  const bool is_few = count <= kPassQueries<Few>;
  if (pages.size() <= 0 || is_few != std::is_same_v<Tiling, Few>) return;
  for (int first = 0; first < count; first += kPassQueries<Tiling>) {
    const int num_tiles =
        min(Tiling::kTiles, (count - first + Tiling::kTileQueries - 1) / Tiling::kTileQueries);
    __syncthreads();  // the previous pass has been read
    LoadQueries(p.select, row, first, num_tiles * Tiling::kTileQueries, count - 1, p.low_weight,
                queries);
    __syncthreads();
    ScoreTiles(p, row, pages, queries, num_tiles, first == 0);
  }
}

template <int kHeadDim, typename Tiling>
cudaError_t Launch(const PageScoreLaunch& p, int num_processors, cudaStream_t stream) {
  constexpr int kSharedBytes = static_cast<int>(sizeof(Queries<kHeadDim, Tiling>)) + 1024;
  if (const cudaError_t error = AllowSharedBytes(ProductKernel<kHeadDim, Tiling>, kSharedBytes);
      error != cudaSuccess) {
    return error;
  }
  const int64_t rows = p.select.out.num_rows;
  const int64_t share = std::max<int64_t>(1, num_processors / rows);
  const dim3 blocks(static_cast<unsigned>(rows), static_cast<unsigned>(share));
  return LaunchOverlapped(ProductKernel<kHeadDim, Tiling>, blocks, kThreads, kSharedBytes, stream,
                          p);
}

template <int kHeadDim>
cudaError_t Launch(const PageScoreLaunch& p, int num_processors, cudaStream_t stream) {
  const cudaError_t error = Launch<kHeadDim, Few>(p, num_processors, stream);
  if (error != cudaSuccess || !p.plan.has_many_queries) return error;
  return Launch<kHeadDim, Many>(p, num_processors, stream);
}

}  // namespace

cudaError_t LaunchPageProducts(const PageScoreLaunch& p, cudaStream_t stream) {
  int processors = 0;
  if (const cudaError_t error = CountMultiprocessors(processors); error != cudaSuccess) {
    return error;
  }
  return ForHeadDim(p.select.kv.layout.head_dim,
                    [&]<int kHeadDim>() { return Launch<kHeadDim>(p, processors, stream); });
}

}  // namespace kvasir::kernels
