// Quest on the GPU, two kernels:
//
//   scores   a warp takes four pages of a row at a time, each lane the same few elements of their
//            bounds; the block's queries, split by sign, come through shared memory in tiles
//   best     one block of threads a row finds the score of the last page that the budget has room
//            for, by counting, and writes the list in the order of pages: nothing is sorted
#include "kernels/sparse/block_select.cuh"
#include "kernels/sparse/quest/quest_launch.h"
#include "kernels/sparse/selection_header.h"

namespace kvasir::kernels {
namespace {

constexpr int kScoreWarps = 8;
constexpr int kPagesOfWarp = 4;
constexpr int kPagesOfBlock = kScoreWarps * kPagesOfWarp;
constexpr int kTileQueries = 16;
// Blocks of threads that score, all rows together: several for each multiprocessor of any GPU.
constexpr int64_t kScoreBlocks = 2048;
// Scores of a row that are chosen from in shared memory: two million tokens. Others stay where they
// are.
constexpr int kCopiedScores = 32 * 1024;

// One (query block, KV head).
struct Row {
  // 32 bits: a 64-bit division is a function call.
  __device__ Row(const QuestLaunch& p, uint32_t row)
      : index(row),
        block(p.blocks[row / static_cast<uint32_t>(p.kv.layout.num_kv_heads)]),
        numbers(p.numbers[row / static_cast<uint32_t>(p.kv.layout.num_kv_heads)]),
        kv_head(row % static_cast<uint32_t>(p.kv.layout.num_kv_heads)),
        header(MakeHeader(block, numbers)),
        candidates(CandidatePages(header, numbers)),
        count(min(min(CeilPages(numbers.budget_tokens), candidates.size()), p.out.capacity)),
        scores(p.scores + row * p.kv.max_blocks_per_slot) {}

  int64_t index;
  QueryBlock block;
  SelectionNumbers numbers;
  int64_t kv_head;
  SelectionHeader header;
  PageRange candidates;
  int64_t count;     // pages to choose
  uint32_t* scores;  // of the candidates
};

template <typename T>
__device__ float Load(const void* values, int64_t i) {
  return static_cast<float>(static_cast<const T*>(values)[i]);
}

// Queries [first, first + count) of the block: min(q, 0), then max(q, 0). NaN goes to both halves.
template <int kHeadDim>
__device__ void LoadQueries(const QuestLaunch& p, const Row& row, int first, int count,
                            float (*to)[2 * kHeadDim]) {
  const int64_t heads = p.kv.layout.num_kv_heads * p.group;
  const int group = static_cast<int>(p.group);
  for (int i = static_cast<int>(threadIdx.x); i < count * kHeadDim; i += blockDim.x) {
    const int query = first + i / kHeadDim;
    const int64_t q_row =
        (row.block.first_row + query / group) * heads + row.kv_head * group + query % group;
    const int64_t at = q_row * kHeadDim + i % kHeadDim;
    const float x = p.q_dtype == DType::kFloat32 ? Load<float>(p.q, at) : Load<BFloat16>(p.q, at);
    to[i / kHeadDim][i % kHeadDim] = x > 0 ? 0.0f : x;
    to[i / kHeadDim][kHeadDim + i % kHeadDim] = x < 0 ? 0.0f : x;
  }
}

// Elements of bounds and queries are dealt to the lanes so many at a time, so that a warp reads in
// one piece.
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

__device__ bool HasPage(const QuestLaunch& p, const Row& row, int64_t page) {
  return page < row.candidates.end && p.kv.row(row.block.slot, page) >= 0;
}

// The sum of values[i] over the warp, for the lanes [8 i, 8 i + 8).
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
    ScoreKernel(const __grid_constant__ QuestLaunch p) {
  constexpr int kElements = 2 * kHeadDim / kWarpThreads;
  __shared__ alignas(16) float queries[kTileQueries][2 * kHeadDim];
  const Row row(p, blockIdx.x);
  if (row.count == 0) return;
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int warp = static_cast<int>(threadIdx.x) / kWarpThreads;
  const int num_queries = static_cast<int>(row.block.num_rows * p.group);
  bool is_loaded = false;
  for (int64_t first = row.candidates.begin + int64_t{blockIdx.y} * kPagesOfBlock;
       first < row.candidates.end; first += int64_t{gridDim.y} * kPagesOfBlock) {
    const int64_t page = first + warp * kPagesOfWarp;
    const int64_t own_page = page + lane / (kWarpThreads / kPagesOfWarp);
    float bounds[kPagesOfWarp][kElements];
    float best = -INFINITY;  // of own_page
#pragma unroll
    for (int i = 0; i < kPagesOfWarp; ++i) {
      for (float& element : bounds[i]) element = 0;
      if (!HasPage(p, row, page + i)) continue;
      LoadParts<Kv>(p.kv.Bounds(row.block.slot, page + i, p.layer, row.kv_head), lane, bounds[i]);
    }
    for (int tile = 0; tile < num_queries; tile += kTileQueries) {
      const int count = min(kTileQueries, num_queries - tile);
      if (!is_loaded) {
        __syncthreads();  // the tile before has been read
        LoadQueries<kHeadDim>(p, row, tile, count, queries);
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
        best = sum > best ? sum : best;  // leaves out NaN
      }
    }
    if (lane % (kWarpThreads / kPagesOfWarp) == 0 && own_page < row.candidates.end) {
      row.scores[own_page - row.candidates.begin] =
          OrderedScore(HasPage(p, row, own_page) ? best : -INFINITY);
    }
  }
}

__global__ void __launch_bounds__(kSelectThreads)
    BestKernel(const __grid_constant__ QuestLaunch p) {
  __shared__ SelectMemory memory;
  extern __shared__ uint32_t copied[];  // [kCopiedScores]
  const Row row(p, blockIdx.x);
  if (threadIdx.x == 0) {
    SelectionHeader header = row.header;
    header.count = static_cast<int32_t>(row.count);
    p.out.headers[row.index] = header;
  }
  if (row.count == 0) return;
  const int64_t n = row.candidates.size();
  const bool fits = n <= kCopiedScores;
  for (int64_t i = threadIdx.x; i < n && fits; i += kSelectThreads) copied[i] = row.scores[i];
  __syncthreads();
  SelectionEntry* list = p.out.entries + row.index * p.out.capacity;
  ForEachBest(fits ? copied : row.scores, n, row.count, memory,
              [&](int64_t place, int64_t item, uint32_t score) {
                list[place] = {.page = row.candidates.begin + item,
                               .chosen = ~uint64_t{0},
                               .live = ~uint64_t{0},
                               .score = ScoreOfOrdered(score)};
              });
}

template <typename Kv, int kHeadDim>
void LaunchScores(const QuestLaunch& p, cudaStream_t stream) {
  const int64_t useful = (p.kv.max_blocks_per_slot + kPagesOfBlock - 1) / kPagesOfBlock;
  const int64_t share = std::max<int64_t>(1, kScoreBlocks / p.out.num_rows);
  const dim3 blocks(static_cast<unsigned>(p.out.num_rows),
                    static_cast<unsigned>(std::min(useful, share)));
  ScoreKernel<Kv, kHeadDim><<<blocks, kScoreWarps * kWarpThreads, 0, stream>>>(p);
}

template <typename Kv>
void LaunchScores(const QuestLaunch& p, cudaStream_t stream) {
  p.kv.layout.head_dim == 128 ? LaunchScores<Kv, 128>(p, stream) : LaunchScores<Kv, 64>(p, stream);
}

}  // namespace

cudaError_t LaunchQuest(const QuestLaunch& p, cudaStream_t stream) {
  p.kv.layout.dtype == DType::kFloat32 ? LaunchScores<float>(p, stream)
                                       : LaunchScores<BFloat16>(p, stream);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  const int copy_bytes =
      static_cast<int>(std::min<int64_t>(kCopiedScores, p.kv.max_blocks_per_slot) *
                       static_cast<int64_t>(sizeof(uint32_t)));
  if (const cudaError_t error =
          cudaFuncSetAttribute(BestKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, copy_bytes);
      error != cudaSuccess) {
    return error;
  }
  BestKernel<<<static_cast<unsigned>(p.out.num_rows), kSelectThreads, copy_bytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace kvasir::kernels
