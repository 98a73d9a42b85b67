// The stages of infinitehip on the GPU behind the first (infinitehip_first.cu), two kernels each:
//
//   scores   a warp takes 32 tokens of what the stage before left, a lane the estimate of one, and
//            the best of a chunk's lanes is its score
//   keep     one block of threads a row finds the score of the last chunk that is kept, by
//            counting, and writes those that are in their order; after the last stage, the list.
//            Where a stage does not run, what it left in an earlier step, if the next one does
#include <algorithm>

#include "kernels/base/overlapped_launch.h"
#include "kernels/sparse/block_list.cuh"
#include "kernels/sparse/infinitehip/infinitehip_launch.h"
#include "kernels/sparse/infinitehip/keep_chunks.cuh"
#include "kernels/sparse/key_code_logits.cuh"
#include "kernels/sparse/reuse/reuse_row.cuh"

namespace kvasir::kernels {
namespace {

constexpr int kScoreWarps = 8;
constexpr int kTileQueries = 16;
static_assert(kTileQueries % kLogitsAtOnce == 0);
// Blocks of threads that score, all rows together: as many as run at once on any GPU, as those
// without work, and the queries of each, cost time.
constexpr int64_t kScoreBlocks = 256;

// The chunks that a stage chooses from in a row: what the stage before left, split.
struct Split {
  __device__ Split(const InfiniteHipLaunch& p, int stage, int64_t row)
      : begins(p.kept[stage - 1].begins + row * p.max_chunks),
        parent_tokens(static_cast<int>(p.stages[stage - 1].chunk_tokens)),
        chunk_tokens(static_cast<int>(p.stages[stage].chunk_tokens)),
        parents(p.kept[stage - 1].counts[row]) {}

  __device__ int count() const { return parents * (parent_tokens / chunk_tokens); }
  __device__ int begin(int chunk) const {
    const int parts = parent_tokens / chunk_tokens;
    return begins[chunk / parts] + chunk % parts * chunk_tokens;
  }

  const int32_t* begins;
  int parent_tokens;
  int chunk_tokens;
  int parents;
};

// Queries [first, first + count) of the row, averaged by the stage's stride; zeros up to the tile.
// kPlaced: rotated to `position`.
template <bool kPlaced, int kHeadDim>
__device__ void LoadTile(const SelectLaunch& p, const DeviceRow& row, int stride, int first,
                         int count, int64_t position, const CodeQueries<kHeadDim>& to) {
  constexpr int kHalf = kHeadDim / 2;
  const int group = static_cast<int>(p.group);
  StoreCodeQueries(to, kTileQueries, [&](int i, int element) {
    if (i >= count) return 0.0f;
    const int begin = (first + i) / group * stride;
    const int end = min(begin + stride, static_cast<int>(row.block.num_rows));
    const auto mean = [&](int e) {
      return MeanElement(p, row, begin, end, (first + i) % group, e);
    };
    if constexpr (kPlaced) {
      const int low = element % kHalf;
      const float2 turned =
          RotationAt(p.rope, kHalf, position).Rotate(low, mean(low), mean(low + kHalf));
      return element < kHalf ? turned.x : turned.y;
    } else {
      return mean(element);
    }
  });
}

// Raises `best` to the largest logit of the tile's queries for a token.
template <typename Key, int kHeadDim>
__device__ void RaiseBest(const Key& key, const CodeQueries<kHeadDim>& queries, int count,
                          float& best) {
  ForEachLogit(key, queries, count,
               [&](int, float logit) { best = logit > best ? logit : best; });  // leaves out NaN
}

// kPlaced: chunks stand side by side, the query behind them.
template <int kHeadDim, bool kPlaced>
__global__ void __launch_bounds__(kScoreWarps* kWarpThreads, 1)
    ScoreKernel(const __grid_constant__ InfiniteHipLaunch p, int stage) {
  __shared__ alignas(16) float elements[kTileQueries][kHeadDim];
  __shared__ float sums[kTileQueries];
  const CodeQueries<kHeadDim> queries = {elements, sums};
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
  const DeviceRow row(p.select, blockIdx.x);
  const Split split(p, stage, row.index);
  if (split.count() <= p.stages[stage].KeptChunks(row.numbers.budget_tokens)) return;
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int warp = static_cast<int>(threadIdx.x) / kWarpThreads;
  const auto stride = static_cast<int>(p.stages[stage].query_stride);
  const int num_means = (static_cast<int>(row.block.num_rows) + stride - 1) / stride;
  const int num_queries = num_means * static_cast<int>(p.select.group);
  const int runs_of_parent = split.parent_tokens / kWarpThreads;
  const int num_runs = split.parents * runs_of_parent;
  const int64_t query_position = split.count() - 1 + p.LeastDistance(row.numbers);
  const PagedKv& kv = p.select.kv;
  bool is_loaded = false;
  for (int first = static_cast<int>(blockIdx.y) * kScoreWarps; first < num_runs;
       first += static_cast<int>(gridDim.y) * kScoreWarps) {
    const int run = first + warp;
    const bool has_run = run < num_runs;
    const int in_parent = run % runs_of_parent * kWarpThreads + lane;
    const int64_t token = has_run ? split.begins[run / runs_of_parent] + in_parent : 0;
    const int64_t page = token / kPageTokens;
    const bool has_key = has_run && kv.row(row.block.slot, page) >= 0;
    const int chunk = (run / runs_of_parent * split.parent_tokens + in_parent) / split.chunk_tokens;
    CodedKey<kHeadDim> key;
    if (has_key) {
      key.Load(kv.layout, kv.KeyCodes(row.block.slot, page, p.select.layer, row.kv_head),
               token % kPageTokens);
    }
    float best = -INFINITY;
    for (int tile = 0; tile < num_queries; tile += kTileQueries) {
      const int count = min(kTileQueries, num_queries - tile);
      if (!is_loaded) {
        __syncthreads();  // the tile before has been read
        LoadTile<kPlaced>(p.select, row, stride, tile, count, query_position, queries);
        __syncthreads();
        is_loaded = num_queries <= kTileQueries;
      }
      if (!has_key) continue;
      if constexpr (kPlaced) {
        RaiseBest(PlacedKey<kHeadDim>(key, RotationAt(p.select.rope, kHeadDim / 2, chunk)), queries,
                  count, best);
      } else {
        RaiseBest(key, queries, count, best);
      }
    }
    for (int distance = 1; distance < split.chunk_tokens; distance *= 2) {
      best = fmaxf(best, __shfl_xor_sync(kAllLanes, best, distance));
    }
    if (has_run && lane % split.chunk_tokens == 0) {
      p.chunk_scores[row.index * p.max_chunks + chunk] = OrderedScore(best);
    }
  }
}

__global__ void __launch_bounds__(kSelectThreads)
    KeepKernel(const __grid_constant__ InfiniteHipLaunch p, int stage) {
  __shared__ SelectMemory memory;
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
  const DeviceRow row(p.select, blockIdx.x);
  SelectionHeader header = MakeHeader(row.block, row.numbers);
  const RowReuse reuse(p.select, row);
  const int first_stage = reuse.FirstStage(header);
  const bool is_last = stage + 1 == InfiniteHipSelector::kStages;
  if (first_stage > stage) {
    return is_last ? reuse.Recall(header) : RecallKept(p, row, reuse, stage, first_stage);
  }
  const Split split(p, stage, row.index);
  int32_t* begins = p.kept[stage].begins + row.index * p.max_chunks;
  uint32_t* scores = p.kept_scores + row.index * p.max_chunks;
  const int64_t kept = p.stages[stage].KeptChunks(row.numbers.budget_tokens);
  if (split.count() > kept) JoinScores(p, row, split.count());
  const int64_t left = KeepBest(ChosenBy(p) + row.index * p.max_chunks, split.count(), kept, memory,
                                [&](int64_t place, int64_t chunk, uint32_t score) {
                                  begins[place] = split.begin(static_cast<int>(chunk));
                                  scores[place] = score;
                                });
  if (threadIdx.x == 0) p.kept[stage].counts[row.index] = static_cast<int32_t>(left);
  if (!is_last) return RememberKept(p, row, reuse, stage);
  __syncthreads();  // all blocks are written
  const BlockList blocks = {
      .begins = begins, .scores = scores, .count = left, .tokens = p.stages[stage].chunk_tokens};
  header.count = static_cast<int32_t>(
      WriteList(blocks, p.select.out.entries + row.index * p.select.out.capacity,
                p.select.out.capacity, memory));
  if (threadIdx.x == 0) p.select.out.headers[row.index] = header;
  reuse.Remember();
}

template <int kHeadDim>
cudaError_t LaunchScores(const InfiniteHipLaunch& p, int stage, cudaStream_t stream) {
  const int64_t rows = p.select.out.num_rows;
  const int64_t runs = p.max_chunks * p.stages[stage].chunk_tokens / kWarpThreads;
  const int64_t useful = (runs + kScoreWarps - 1) / kScoreWarps;
  const int64_t share = std::max<int64_t>(1, kScoreBlocks / rows);
  const dim3 blocks(static_cast<unsigned>(rows), static_cast<unsigned>(std::min(useful, share)));
  const auto kernel =
      p.select.rope.on() ? ScoreKernel<kHeadDim, true> : ScoreKernel<kHeadDim, false>;
  return LaunchOverlapped(kernel, blocks, kScoreWarps * kWarpThreads, 0, stream, p, stage);
}

}  // namespace

cudaError_t LaunchInfiniteHipStage(const InfiniteHipLaunch& p, int stage, cudaStream_t stream) {
  const auto rows = static_cast<unsigned>(p.select.out.num_rows);
  if (stage == 0) return LaunchInfiniteHipFirst(p, stream);
  const bool is_wide = p.select.kv.layout.head_dim == 128;
  if (const cudaError_t error = (is_wide ? LaunchScores<128> : LaunchScores<64>)(p, stage, stream);
      error != cudaSuccess) {
    return error;
  }
  return LaunchOverlapped(KeepKernel, rows, kSelectThreads, kCopyBytes, stream, p, stage);
}

}  // namespace kvasir::kernels
