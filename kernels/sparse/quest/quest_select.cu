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

// One (query block, KV head).
struct Row {
  __device__ Row(const QuestLaunch& p, int64_t row)
      : index(row),
        block(p.blocks[row / p.kv.layout.num_kv_heads]),
        numbers(p.numbers[row / p.kv.layout.num_kv_heads]),
        kv_head(row % p.kv.layout.num_kv_heads),
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

// A lane's part of the bounds of a page.
template <typename Kv, int kCount>
struct alignas(sizeof(Kv) * kCount) BoundsPart {
  Kv values[kCount];
};

// Whether the slot has the page; else zeros.
template <typename Kv, int kCount>
__device__ bool LoadBounds(const QuestLaunch& p, const Row& row, int64_t page, int lane,
                           float (&to)[kCount]) {
  const bool is_there = page < row.candidates.end && p.kv.row(row.block.slot, page) >= 0;
  BoundsPart<Kv, kCount> part = {};
  if (is_there) {
    const std::byte* bounds = p.kv.Bounds(row.block.slot, page, p.layer, row.kv_head);
    part = reinterpret_cast<const BoundsPart<Kv, kCount>*>(bounds)[lane];
  }
  for (int i = 0; i < kCount; ++i) to[i] = static_cast<float>(part.values[i]);
  return is_there;
}

template <typename Kv, int kHeadDim>
__global__ void __launch_bounds__(kScoreWarps* kWarpThreads)
    ScoreKernel(const __grid_constant__ QuestLaunch p) {
  constexpr int kElements = 2 * kHeadDim / kWarpThreads;
  __shared__ float queries[kTileQueries][2 * kHeadDim];
  const Row row(p, blockIdx.x);
  if (row.count == 0) return;
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int warp = static_cast<int>(threadIdx.x) / kWarpThreads;
  const int num_queries = static_cast<int>(row.block.num_rows * p.group);
  bool is_loaded = false;
  for (int64_t first = row.candidates.begin + int64_t{blockIdx.y} * kPagesOfBlock;
       first < row.candidates.end; first += int64_t{gridDim.y} * kPagesOfBlock) {
    const int64_t page = first + warp * kPagesOfWarp;
    float bounds[kPagesOfWarp][kElements];
    bool is_there[kPagesOfWarp];
    float best[kPagesOfWarp];
#pragma unroll
    for (int i = 0; i < kPagesOfWarp; ++i) {
      is_there[i] = LoadBounds<Kv>(p, row, page + i, lane, bounds[i]);
      best[i] = -INFINITY;
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
        const float* q = queries[query] + lane * kElements;
#pragma unroll
        for (int i = 0; i < kPagesOfWarp; ++i) {
          float sum = 0;
#pragma unroll
          for (int j = 0; j < kElements; ++j) sum += q[j] * bounds[i][j];
          for (int distance = kWarpThreads / 2; distance > 0; distance /= 2) {
            sum += __shfl_xor_sync(kAllLanes, sum, distance);
          }
          best[i] = sum > best[i] ? sum : best[i];  // leaves out NaN
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kPagesOfWarp; ++i) {
      if (lane != 0 || page + i >= row.candidates.end) continue;
      row.scores[page + i - row.candidates.begin] = OrderedScore(is_there[i] ? best[i] : -INFINITY);
    }
  }
}

__global__ void __launch_bounds__(kSelectThreads)
    BestKernel(const __grid_constant__ QuestLaunch p) {
  __shared__ SelectMemory memory;
  const Row row(p, blockIdx.x);
  if (threadIdx.x == 0) {
    SelectionHeader header = row.header;
    header.count = static_cast<int32_t>(row.count);
    p.out.headers[row.index] = header;
  }
  if (row.count == 0) return;
  SelectionEntry* list = p.out.entries + row.index * p.out.capacity;
  ForEachBest(row.scores, row.candidates.size(), row.count, memory,
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
  BestKernel<<<static_cast<unsigned>(p.out.num_rows), kSelectThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace kvasir::kernels
