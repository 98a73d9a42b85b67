// The later stages of infinitehip on the GPU; decode has its own (infinitehip_decode.cu). A cluster
// of CTAs takes a row.
//
//   score   a warp takes 32 tokens of the chunks that the stage before left, and the best logit of
//           a chunk is its score; a CTA sends the others the scores of its chunks
//   keep    each CTA finds for itself, by counting, the score of the last chunk that is kept, so
//           all have the chunks of the next stage; after the last stage the first CTA lists them
//
// Where a row chooses for itself, one launch does it all. Where the rows of a layer choose
// together, each step is a launch, so that scores of all rows, and of all ranks, are in device
// memory when they are joined. If a stage does not run, the next one reads the chunks that it left
// in an earlier step.
#include <algorithm>
#include <bit>

#include "kernels/base/hopper.cuh"
#include "kernels/base/overlapped_launch.h"
#include "kernels/sparse/common/block_list.cuh"
#include "kernels/sparse/common/cluster_launch.h"
#include "kernels/sparse/infinitehip/infinitehip_launch.h"
#include "kernels/sparse/infinitehip/infinitehip_stages.cuh"

namespace kvasir::kernels {
namespace {

// Runs of 32 tokens that a warp finds at once: two lanes each.
constexpr int kRunsFound = kWarpThreads / 2;
// Most tiles of queries in shared memory, and of 32 keys per warp: fewer where there are many tiles
// of queries.
constexpr int kMostTilesAtOnce = 16;
constexpr int kRunsAtOnce = 4;
constexpr int kRunsBesideTiles = 2;
// Most chunks of a stage that are chosen from in shared memory. More are in device memory.
constexpr int64_t kSharedChunks = 2048;

// A CTA's part of a row. All functions are called by all threads of the CTA, and alike by the whole
// cluster.
template <int kHeadDim, bool kPlaced>
class LaterStages : StageRow {
 public:
  using Memory = StageMemory<kHeadDim>;
  using Tile = typename Memory::Tile;
  using Keys = typename Memory::Keys;
  static constexpr int kTilesOfKeys = kPlaced ? 1 : 2;  // multiplied at once; limited by registers

  __device__ LaterStages(const InfiniteHipLaunch& p, const StagesCut& cut, const DeviceRow& row,
                         Memory& memory)
      : StageRow(p, cut, row),
        select_(memory.select),
        tiles_(memory.Tiles()),
        keys_(memory.KeysOfRuns(cut)),
        chunks_(memory.Chunks(cut)) {}

  __device__ void Run(const InfiniteHipSteps& steps) {
#pragma unroll 1
    for (int step = steps.begin; step < steps.end; ++step) {
      const int stage = InfiniteHipSteps::StageOf(step);
      const bool runs = first_stage_ <= stage;
      if (InfiniteHipSteps::Scores(step)) {
        if (runs) Score(stage);
        continue;
      }
      WaitForLeft(stage - 1);
      runs ? Keep(stage) : Recall(stage);
    }
  }

 private:
  __device__ int NumChunks(int stage) const {
    return parents_.count << PartsLog2(parents_.tokens, tokens_of(stage));
  }

  // --- addresses ---

  __device__ uint32_t* Shared(int array) const { return chunks_ + array * cut_.shared_chunks; }
  __device__ uint32_t* ScoresOf(int stage) const {
    return tells() ? Shared(stage - 1) : OfRow(p_.ScoresOf(stage));
  }
  __device__ int32_t* KeptBegins(int stage) const {
    return in_shared() ? reinterpret_cast<int32_t*>(Shared(stage + 1))
                       : OfRow(p_.kept[stage].begins);
  }
  __device__ uint32_t* KeptScores() const {
    return in_shared() ? Shared(0) : OfRow(p_.kept_scores);
  }

  // Must come before all reads and writes of memory that earlier kernels use.
  __device__ void WaitForLeft(int stage) {
    if (has_waited_) return;
    has_waited_ = true;
    hopper::ClusterSync();  // all CTAs run, and know which stages do
    cudaGridDependencySynchronize();
    cudaTriggerProgrammaticLaunchCompletion();
    parents_ = LeftBy(stage);
  }

  // --- score ---

  // Loads the queries from tile `first_tile` on, as many as there is room for. kPlaced: chunks are
  // chunk-indexed, and the query comes after them. Meets before and after, if it loads.
  __device__ void LoadQueries(int stage, int first_tile) {
    const int64_t position = kPlaced ? NumChunks(stage) - 1 + p_.LeastDistance(row_.numbers) : 0;
    const HeldQueries wanted = {
        min(static_cast<int>(p_.stages[stage].query_stride), static_cast<int>(row_.tile.num_rows)),
        first_tile, position};
    if (wanted == held_) return;
    held_ = wanted;
    const int group = static_cast<int>(p_.select.group);
    const int num_queries = NumQueries(stage);
    __syncthreads();  // the previous tiles have been read
    num_tiles_ =
        min((num_queries + kProductQueries - 1) / kProductQueries - first_tile, cut_.tiles_at_once);
    StageQueries(tiles_, num_tiles_, [&](int of_tiles, int i) {
      // Places after the last query repeat it.
      const int query = min(first_tile * kProductQueries + of_tiles, num_queries - 1);
      const int begin = query / group * wanted.stride;
      const int end = min(begin + wanted.stride, static_cast<int>(row_.tile.num_rows));
      const auto mean = [&](int of) {
        return MeanFour(p_.select, row_, begin, end, query % group, of);
      };
      if constexpr (!kPlaced) return mean(i);
      constexpr int kHalf = kHeadDim / 8;
      const int low = i % kHalf;
      const float4 x = mean(low);
      const float4 y = mean(low + kHalf);
      const RotationAt at(p_.select.rope, kHeadDim / 2, position);
      const float2 turned[4] = {at.Rotate(4 * low, x.x, y.x), at.Rotate(4 * low + 1, x.y, y.y),
                                at.Rotate(4 * low + 2, x.z, y.z), at.Rotate(4 * low + 3, x.w, y.w)};
      if (i == low) return float4{turned[0].x, turned[1].x, turned[2].x, turned[3].x};
      return float4{turned[0].y, turned[1].y, turned[2].y, turned[3].y};
    });
    __syncthreads();
  }
  __device__ int NumQueries(int stage) const {
    const auto stride = static_cast<int>(p_.stages[stage].query_stride);
    return (static_cast<int>(row_.tile.num_rows) + stride - 1) / stride *
           static_cast<int>(p_.select.group);
  }

  // Runs of a warp, each 32 tokens of one parent, `stride` runs apart.
  struct Runs {
    int first;
    int stride;
    int count;
    int begin;               // of run lane / 2
    const std::byte* codes;  // of the page of its first token, or of its last
  };
  __device__ Runs FindRuns(int first, int stride, int num_runs) const {
    const int log2 = PartsLog2(parents_.tokens, kWarpThreads);
    const int run = first + lane() / 2 * stride;
    Runs runs = {.first = first,
                 .stride = stride,
                 .count = min(kRunsFound, (num_runs - first + stride - 1) / stride),
                 .begin = 0,
                 .codes = nullptr};
    if (run >= num_runs) return runs;
    const int parent = run >> log2;
    runs.begin = parents_.begins[parent] + (run - (parent << log2)) * kWarpThreads;
    const int64_t page = (runs.begin + lane() % 2 * (kWarpThreads - 1)) / kPageTokens;
    if (p_.select.kv.extent(row_.tile.slot, page) >= 0) {
      runs.codes = p_.select.kv.KeyCodes(row_.tile.slot, page, p_.select.layer, row_.kv_head);
    }
    return runs;
  }
  // Begins to copy the keys of run i.
  __device__ void BeginRun(const Runs& runs, int i, Keys& keys) const {
    const int begin = __shfl_sync(kAllLanes, runs.begin, 2 * i);
    const auto own = reinterpret_cast<uint64_t>(runs.codes);
    const uint64_t first = __shfl_sync(kAllLanes, own, 2 * i);
    const uint64_t last = __shfl_sync(kAllLanes, own, 2 * i + 1);
    constexpr int kPage = static_cast<int>(kPageTokens);
    const int token = begin + lane();
    const uint64_t page = token / kPage == begin / kPage ? first : last;
    keys.Begin(p_.select.kv.layout, reinterpret_cast<const std::byte*>(page), token % kPage);
  }

  // Calls use(run, keys) for the warp's runs, of which several are copied at once.
  template <typename Use>
  __device__ void ForEachRun(const Use& use) const {
    const int num_runs = parents_.count << PartsLog2(parents_.tokens, kWarpThreads);
    const int stride = kStageWarps * num_ctas();
    Keys* const keys = keys_ + warp() * cut_.runs_at_once;
#pragma unroll 1
    for (int first = warp() * num_ctas() + rank_; first < num_runs; first += kRunsFound * stride) {
      const Runs runs = FindRuns(first, stride, num_runs);
#pragma unroll 1
      for (int begin = 0; begin < runs.count; begin += cut_.runs_at_once) {
        const int count = min(cut_.runs_at_once, runs.count - begin);
        __syncwarp();  // the previous keys have been read
#pragma unroll 1
        for (int i = 0; i < count; ++i) BeginRun(runs, begin + i, keys[i]);
        CommitCopies();
        WaitForCopies<0>();
        __syncwarp();
#pragma unroll 1
        for (int i = 0; i < count; ++i) keys[i].Finish();
        __syncwarp();
#pragma unroll 1
        for (int i = 0; i < count; ++i) use(first + (begin + i) * stride, keys[i]);
      }
    }
  }

  // Loading the queries need not wait for the stage before, unless they are placed.
  __device__ void Score(int stage) {
    if constexpr (kPlaced) WaitForLeft(stage - 1);
    int tile = 0;
    do {
      LoadQueries(stage, tile);
      WaitForLeft(stage - 1);
      if (NumChunks(stage) <= NumKept(stage)) return;
      ScoreBy(stage, tile);
      tile += cut_.tiles_at_once;
    } while (tile * kProductQueries < NumQueries(stage));
    if (tells()) Tell(stage);
    hopper::ClusterSync();
  }

  // Scores by the loaded tiles, of which `tile` is the first.
  __device__ void ScoreBy(int stage, int tile) {
    const int chunk_tokens = tokens_of(stage);
    const int tiles_log2 = PartsLog2(chunk_tokens, kProductKeys);   // of a chunk
    const int chunks_log2 = PartsLog2(kWarpThreads, chunk_tokens);  // of a run
    uint32_t* const scores = ScoresOf(stage);
    ForEachRun([&](int run, const Keys& keys) {
      const int first_chunk = run << chunks_log2;
      uint32_t own = 0;  // of chunk `lane` of the run
#pragma unroll 1
      for (int first = 0; first < kKeyTiles; first += kTilesOfKeys) {
        float best[kTilesOfKeys];
#pragma unroll
        for (float& of_tile : best) of_tile = -INFINITY;
        const auto raise = [&](int, int k, float2 logits) {
          float& of_tile = best[k - first];
          of_tile = fmaxf(of_tile, fmaxf(logits.x, logits.y));  // ignores NaN
        };
        if constexpr (kPlaced) {
          const auto position_of = [&](int key) { return first_chunk + key / chunk_tokens; };
          ForEachPlacedLogit<kTilesOfKeys>(keys, p_.select.rope, position_of, tiles_, num_tiles_,
                                           raise, first);
        } else {
          ForEachLogit<kTilesOfKeys>(keys, tiles_, num_tiles_, raise, first);
        }
#pragma unroll
        for (int k = 0; k < kTilesOfKeys; ++k) {
          const uint32_t of_tile = __reduce_max_sync(kAllLanes, OrderedScore(best[k]));
          if ((first + k) >> tiles_log2 == lane()) own = max(own, of_tile);
        }
      }
      if (lane() >> chunks_log2 != 0) return;
      uint32_t& score = scores[first_chunk + lane()];
      score = tile == 0 ? own : max(score, own);
    });
  }

  // Sends the scores of the warp's chunks to the other CTAs.
  __device__ void Tell(int stage) {
    __syncwarp();
    uint32_t* const scores = ScoresOf(stage);
    const int n = NumChunks(stage);
    const int chunks_log2 = PartsLog2(kWarpThreads, tokens_of(stage));  // of a run
    const int blocks_log2 = PartsLog2(num_ctas(), 1);
#pragma unroll 1
    for (int i = lane();; i += kWarpThreads) {
      const int of_warp = i >> blocks_log2;
      const int run = ((of_warp >> chunks_log2) * kStageWarps + warp()) * num_ctas() + rank_;
      const int chunk = (run << chunks_log2) + (of_warp & ((1 << chunks_log2) - 1));
      if (chunk >= n) return;
      const int block = i & (num_ctas() - 1);
      if (block != rank_) {
        *hopper::OfBlock(&scores[chunk], static_cast<unsigned>(block)) = scores[chunk];
      }
    }
  }

  // --- keep ---

  // Returns the scores that the row chooses by: where rows choose together, the best of theirs.
  __device__ const uint32_t* JoinScores(int stage, int n) {
    if (!together()) return ScoresOf(stage);
    if (p_.rank_scores != nullptr) return p_.RankScores(row_.index);
    const InfiniteHipLaunch::Rows rows = p_.Together(row_.index);
    const uint32_t* const scores = p_.ScoresOf(stage);
    uint32_t* const joined = in_shared() ? Shared(1) : OfRow(p_.layer_scores);
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < n; i += kStageThreads) {
      uint32_t best = 0;
#pragma unroll 1
      for (int64_t head = rows.begin; head < rows.end; ++head) {
        best = max(best, scores[head * p_.max_chunks + i]);
      }
      joined[i] = best;
    }
    __syncthreads();
    return joined;
  }

  // Calls use(place, chunk, score) for the kept chunks, ascending. Where there is room for all, for
  // all with a score of 0.
  template <typename Use>
  __device__ void ForEachKept(int stage, const Use& use) {
    const int n = NumChunks(stage);
    const int kept = NumKept(stage);
    if (n > kept) return ForEachBest<kStageThreads>(JoinScores(stage, n), n, kept, select_, use);
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < n; i += kStageThreads)
      use(i, i, OrderedScore(0));
  }

  __device__ void Keep(int stage) {
    const bool leads = rank_ == 0;
    if (stage == kLast && !leads) return;
    const int log2 = PartsLog2(parents_.tokens, tokens_of(stage));
    const int tokens = tokens_of(stage);
    int32_t* const begins = KeptBegins(stage);
    uint32_t* const scores = KeptScores();
    ForEachKept(stage, [&](int64_t place, int64_t item, uint32_t score) {
      const auto chunk = static_cast<int>(item);
      const int parent = chunk >> log2;
      begins[place] = parents_.begins[parent] + (chunk - (parent << log2)) * tokens;
      if (stage == kLast) scores[place] = score;
    });
    __syncthreads();  // all are written
    const int left = min(NumChunks(stage), NumKept(stage));
    parents_ = {begins, left, tokens};
    if (stage == kLast) return WriteRow();
    if (leads) RememberKept(stage);
  }

  // Stores the kept chunks for later launches and steps.
  __device__ void RememberKept(int stage) const {
    const bool remembers = reuse_.remembers();
    int32_t* const left = OfRow(p_.kept[stage].begins);
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < parents_.count; i += kStageThreads) {
      if (together()) left[i] = parents_.begins[i];
      if (remembers) reuse_.items(stage)[i] = parents_.begins[i];
    }
    if (threadIdx.x != 0) return;
    p_.kept[stage].counts[row_.index] = parents_.count;
    if (remembers) reuse_.remembered().kept[stage] = parents_.count;
  }

  __device__ void WriteRow() {
    const BlockList blocks = {.begins = parents_.begins,
                              .scores = KeptScores(),
                              .count = parents_.count,
                              .tokens = parents_.tokens};
    header_.count = static_cast<int32_t>(WriteList<kStageThreads>(
        blocks, p_.select.out.capacity, select_,
        [&](int64_t place, const SelectionEntry& entry) { reuse_.WriteEntry(place, entry); }));
    if (threadIdx.x == 0) reuse_.WriteHeader(header_, first_stage_);
  }

  // Takes the place of Keep for a stage that does not run.
  __device__ void Recall(int stage) {
    if (stage < kLast) {
      if (first_stage_ == stage + 1) parents_ = LeftBy(stage);
      return;
    }
    reuse_.Recall(header_, {.index = static_cast<unsigned>(rank_) * kStageThreads + threadIdx.x,
                            .count = cut_.blocks_of_row * kStageThreads});
  }

  SelectMemory& select_;
  Tile* const tiles_;
  Keys* const keys_;
  uint32_t* const chunks_;
  Parents parents_ = {};
  HeldQueries held_;
  int num_tiles_ = 0;  // tiles in shared memory
  bool has_waited_ = false;
};

template <int kHeadDim, bool kPlaced>
__global__ void __launch_bounds__(kStageThreads, 1)
    StagesKernel(const __grid_constant__ InfiniteHipLaunch p, const __grid_constant__ StagesCut cut,
                 const InfiniteHipSteps steps) {
  extern __shared__ uint4 raw[];
  // The kernel begins when all CTAs of the kernel before it have waited for what came before that,
  // so only the output of that kernel is still to wait for.
  const DeviceRow row(p.select, blockIdx.x / cut.blocks_of_row);
  LaterStages<kHeadDim, kPlaced> stages(p, cut, row,
                                        *reinterpret_cast<StageMemory<kHeadDim>*>(raw));
  stages.Run(steps);
}

template <int kHeadDim, bool kPlaced>
cudaError_t Launch(const InfiniteHipLaunch& p, const InfiniteHipSteps& all, cudaStream_t stream) {
  const int64_t rows = p.select.out.num_rows;
  const auto tiles =
      static_cast<int>((p.max_rows * p.select.group + kProductQueries - 1) / kProductQueries);
  StagesCut cut = {
      .blocks_of_row = 1,
      .tiles_at_once = std::min(tiles, kMostTilesAtOnce),
      .runs_at_once = tiles <= kMostTilesAtOnce / 4 ? kRunsAtOnce : kRunsBesideTiles,
      .shared_chunks = p.later_chunks <= kSharedChunks ? static_cast<int>(p.later_chunks) : 0};
  const RowKernel kernel = {.kernel = StagesKernel<kHeadDim, kPlaced>,
                            .threads = kStageThreads,
                            .shared_bytes = StageMemory<kHeadDim>::Bytes(cut)};
  if (const cudaError_t error = FindClusterBlocks(kernel, rows, cut.blocks_of_row);
      error != cudaSuccess) {
    return error;
  }
  cut.blocks_of_row = std::bit_floor(cut.blocks_of_row);
  const int at_once = p.layer_scores == nullptr ? InfiniteHipSteps::kCount : 1;
  for (int step = all.begin; step < all.end; step += at_once) {
    const InfiniteHipSteps steps = {step, step + at_once};
    if (const cudaError_t error = LaunchOverlappedClusters(
            kernel.kernel, cut.blocks_of_row, static_cast<unsigned>(rows) * cut.blocks_of_row,
            kStageThreads, kernel.shared_bytes, stream, p, cut, steps);
        error != cudaSuccess) {
      return error;
    }
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t LaunchInfiniteHipLater(const InfiniteHipLaunch& p, const InfiniteHipSteps& steps,
                                   cudaStream_t stream) {
  const bool is_wide = p.select.kv.layout.head_dim == 128;
  if (p.select.rope.on()) {
    return (is_wide ? Launch<128, true> : Launch<64, true>)(p, steps, stream);
  }
  return (is_wide ? Launch<128, false> : Launch<64, false>)(p, steps, stream);
}

}  // namespace kvasir::kernels
