// infinitehip on the GPU where all query tiles of the step are one token, in bfloat16. One kernel
// runs all stages; a cluster of CTAs takes a row.
//
//   score   the first stage by bounds of pages, later ones by key codes: a warp takes 32 tokens of
//           the chunks that were left, and the best logit of a chunk is its score. Every CTA of the
//           cluster gets all scores
//   keep    each CTA chooses for itself, so that all have the chunks of the next stage. After the
//           last stage the first CTA makes the list
//
// If a stage does not run, the next one reads the chunks that it left in an earlier step.
#include <algorithm>

#include "kernels/base/head_dim.h"
#include "kernels/sparse/common/block_list.cuh"
#include "kernels/sparse/common/cluster_launch.h"
#include "kernels/sparse/common/cluster_select.cuh"
#include "kernels/sparse/infinitehip/chunk_row.cuh"
#include "kernels/sparse/key_logits/token_logits.cuh"
#include "kernels/sparse/page_scores/page_stream.cuh"
#include "kernels/sparse/reuse/reuse_row.cuh"

namespace kvasir::kernels {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarpThreads;
constexpr int kStages = InfiniteHipSelector::kStages;
constexpr int kLast = kStages - 1;

// Shared memory of a CTA.
template <int kHeadDim>
struct DecodeMemory {
  GroupQueries<kHeadDim> bound_queries;  // of the first stage
  TokenQueries<kHeadDim> queries;        // of the others
  SelectMemory select;
};

// Sizes, in items, of the arrays that follow DecodeMemory.
struct Rooms {
  uint32_t runs = 0;          // addresses of the codes of the CTA's runs: two pages each
  uint32_t pages = 0;         // the CTA's scores
  uint32_t first_chunks = 0;  // scores of the first stage
  uint32_t later_chunks = 0;  // scores of the others, and begins of the chunks left

  KVASIR_HOST_DEVICE size_t bytes() const {
    return runs * 2 * sizeof(std::byte*) +
           (pages + first_chunks + (2 + kStages) * later_chunks) * sizeof(uint32_t);
  }
};

// A CTA's part of a row. All functions are called by all threads of the CTA, and alike by the whole
// cluster.
template <int kHeadDim>
class DecodeStages {
 public:
  __device__ DecodeStages(const InfiniteHipLaunch& p, const ChunkRow& row, const RowReuse& reuse,
                          const Rooms& rooms, DecodeMemory<kHeadDim>& memory)
      : p_(p),
        row_(row),
        reuse_(reuse),
        rooms_(rooms),
        memory_(memory),
        codes_(reinterpret_cast<const std::byte**>(&memory + 1)),
        page_scores_(reinterpret_cast<uint32_t*>(codes_ + 2 * rooms.runs)),
        chunks_(page_scores_ + rooms.pages),
        rank_(static_cast<int>(hopper::ClusterRank())),
        num_ctas_(static_cast<int>(hopper::ClusterBlocks())) {}

  // Begins the first stage: the whole row is one chunk to be split.
  __device__ void BeginAnew() {
    begins_ = Begins(kLast);
    if (threadIdx.x == 0) begins_[0] = static_cast<int32_t>(row_.header.sink_end);
    tokens_ = kWholeRow;
    num_chunks_ = static_cast<int>(row_.count);
    __syncthreads();
  }
  // Scores the chunks `own` for the first stage, by their pages [pages.begin, pages.end).
  __device__ void ScorePages(PageStream<kHeadDim>& stream, const PageRange& pages,
                             const ClusterShare& own) {
    stream.Score(memory_.bound_queries, page_scores_);
    __syncthreads();
    for (uint32_t i = own.begin + threadIdx.x; i < own.end; i += kThreads) {
      const PageRange of_chunk = row_.PagesOf(i, i + 1);
      uint32_t best = 0;
      for (int64_t page = of_chunk.begin; page < of_chunk.end; ++page) {
        best = max(best, page_scores_[page - pages.begin]);
      }
      for (int block = 0; block < num_ctas_; ++block) *OfBlock(Scores(0) + i, block) = best;
    }
    hopper::ClusterSync();
  }

  // Reads the chunks that a stage left in an earlier step, and splits them for the next stage.
  __device__ void Recall(int stage) {
    left_ = reuse_.remembered().kept[stage];
    tokens_ = tokens_of(stage);
    begins_ = Begins(stage);
    const int32_t* const items = reuse_.items(stage);
    for (int i = static_cast<int>(threadIdx.x); i < left_; i += kThreads) begins_[i] = items[i];
    __syncthreads();
    Split(stage + 1);
  }

  // Runs the stages from this one on. The first stage must have been scored.
  __device__ void Run(const int first_stage) {
#pragma unroll 1
    for (int stage = first_stage;; ++stage) {
      if (stage > 0 && num_chunks_ > NumKept(stage)) Score(stage);
      if (stage == kLast && rank_ != 0) return;
      Keep(stage);
      if (stage == kLast) return WriteRow(first_stage);
      Split(stage + 1);
    }
  }

 private:
  // Longer than any row, and a power of two, as chunk lengths are.
  static constexpr int kWholeRow = 1 << 30;

  __device__ int tokens_of(int stage) const {
    return static_cast<int>(p_.stages[stage].chunk_tokens);
  }
  __device__ int NumKept(int stage) const {
    return static_cast<int>(p_.stages[stage].KeptChunks(row_.at.numbers.budget_tokens));
  }
  // Log2 of the number of parts of `tokens` in a chunk that the stage before left.
  __device__ int PartsLog2(int tokens) const { return __ffs(tokens_) - __ffs(tokens); }
  // Returns where such a part begins.
  __device__ int BeginOf(int part, int tokens) const {
    const int log2 = PartsLog2(tokens);
    return begins_[part >> log2] + (part & ((1 << log2) - 1)) * tokens;
  }

  // --- shared memory: scores of the stages, then begins of the chunks they left ---

  __device__ uint32_t* Scores(int stage) const { return stage == 0 ? chunks_ : Later(stage - 1); }
  __device__ int32_t* Begins(int stage) const {
    return reinterpret_cast<int32_t*>(Later(kLast + stage));
  }
  // Reuses the scores of stage 1: all CTAs are past it.
  __device__ uint32_t* KeptScores() const { return Scores(1); }
  __device__ uint32_t* Later(int array) const {
    return chunks_ + rooms_.first_chunks + array * rooms_.later_chunks;
  }

  // --- score ---

  // A run is 32 tokens of one chunk that was left; the CTAs take runs in turn. Finds and prefetches
  // the codes of this CTA's runs: those of the pages of a run's first and last token.
  __device__ void FindRuns(int num_runs) {
    for (int i = static_cast<int>(threadIdx.x); i < 2 * num_runs; i += kThreads) {
      const bool is_last = i % 2 != 0;
      const int token =
          BeginOf(i / 2 * num_ctas_ + rank_, kWarpThreads) + (is_last ? kWarpThreads - 1 : 0);
      const int64_t page = token / kPageTokens;
      const int64_t slot = row_.at.tile.slot;
      const std::byte* codes = nullptr;
      if (p_.select.kv.extent(slot, page) >= 0) {
        codes = p_.select.kv.KeyCodes(slot, page, p_.select.layer, row_.at.kv_head);
        TokenKeys<kHeadDim>::Prefetch(p_.select.kv.layout, codes, token % kPageTokens, is_last);
      }
      codes_[i] = codes;
    }
    __syncthreads();
  }

  __device__ void Score(int stage) {
    const int all_runs = left_ << PartsLog2(kWarpThreads);
    const int num_runs = (all_runs - rank_ + num_ctas_ - 1) / num_ctas_;  // of this CTA
    FindRuns(num_runs);
    const auto load = [&](int run, TokenKeys<kHeadDim>& keys) {
      keys.Load(p_.select.kv.layout, codes_[2 * run], codes_[2 * run + 1],
                BeginOf(run * num_ctas_ + rank_, kWarpThreads));
    };
    const int parts = kWarpThreads / tokens_of(stage);  // chunks of a run: 1, 2 or 4
    uint32_t* const told = OfBlock(Scores(stage), min(lane(), num_ctas_ - 1));
    TokenKeys<kHeadDim> next;
    if (warp() < num_runs) load(warp(), next);
#pragma unroll 1
    for (int run = warp(); run < num_runs; run += kWarps) {
      const TokenKeys<kHeadDim> keys = next;
      if (run + kWarps < num_runs) load(run + kWarps, next);
      float best[4];  // of eight tokens each, then of the chunks
      keys.BestLogits(memory_.queries, best);
      if (parts <= 2) {
        best[0] = fmaxf(best[0], best[1]);
        best[1] = fmaxf(best[2], best[3]);
      }
      if (parts == 1) best[0] = fmaxf(best[0], best[1]);
      uint32_t* const to = told + (run * num_ctas_ + rank_) * parts;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i >= parts) break;
        const uint32_t score = __reduce_max_sync(kAllLanes, OrderedScore(best[i]));
        if (lane() < num_ctas_) to[i] = score;
      }
    }
    hopper::ClusterSync();
  }

  // --- keep ---

  // Keeps chunks by the scores, or all where there is room. The last stage, whose chunks are not
  // split, also keeps the scores: 0 where there are none.
  __device__ void Keep(int stage) {
    const int tokens = tokens_of(stage);
    const int n = num_chunks_;
    left_ = min(n, NumKept(stage));
    int32_t* const begins = stage == kLast ? Begins(0) : Begins(stage);
    uint32_t* const scores = KeptScores();
    const auto keep = [&](int64_t place, int64_t chunk, uint32_t score) {
      begins[place] = BeginOf(static_cast<int>(chunk), tokens);
      if (stage == kLast) scores[place] = score;
    };
    if (n > left_) {
      ForEachBest<kThreads>(Scores(stage), n, left_, memory_.select, keep);
    } else {
      for (int i = static_cast<int>(threadIdx.x); i < n; i += kThreads) {
        keep(i, i, OrderedScore(0));
      }
    }
    __syncthreads();  // all are written, and the earlier chunks are no longer read
    begins_ = begins;
    tokens_ = tokens;
    if (stage < kLast && rank_ == 0 && reuse_.remembers()) Remember(stage);
  }

  // Remembers the chunks that a stage left, for later steps.
  __device__ void Remember(int stage) const {
    int32_t* const items = reuse_.items(stage);
    for (int i = static_cast<int>(threadIdx.x); i < left_; i += kThreads) items[i] = begins_[i];
    if (threadIdx.x == 0) reuse_.remembered().kept[stage] = left_;
  }

  // Splits the chunks that the stage before left into those of this one.
  __device__ void Split(int stage) { num_chunks_ = left_ << PartsLog2(tokens_of(stage)); }

  __device__ void WriteRow(int first_stage) {
    const BlockList blocks = {
        .begins = begins_, .scores = KeptScores(), .count = left_, .tokens = tokens_};
    SelectionHeader header = row_.header;
    header.count = static_cast<int32_t>(WriteList<kThreads>(
        blocks, p_.select.out.capacity, memory_.select,
        [&](int64_t place, const SelectionEntry& entry) { reuse_.WriteEntry(place, entry); }));
    if (threadIdx.x == 0) reuse_.WriteHeader(header, first_stage);
  }

  __device__ static int lane() { return static_cast<int>(threadIdx.x) % kWarpThreads; }
  __device__ static int warp() { return static_cast<int>(threadIdx.x) / kWarpThreads; }
  template <typename T>
  __device__ static T* OfBlock(T* place, int block) {
    return hopper::OfBlock(place, static_cast<unsigned>(block));
  }

  const InfiniteHipLaunch& p_;
  const ChunkRow& row_;
  const RowReuse& reuse_;
  const Rooms& rooms_;
  DecodeMemory<kHeadDim>& memory_;
  const std::byte** const codes_;
  uint32_t* const page_scores_;
  uint32_t* const chunks_;
  const int rank_;
  const int num_ctas_;
  int num_chunks_ = 0;  // chunks that the stage chooses from
  // Begins of the chunks that the stage before left, ascending.
  int32_t* begins_ = nullptr;
  int left_ = 0;
  int tokens_ = 0;  // of each chunk
};

template <int kHeadDim>
__global__ void __launch_bounds__(kThreads, 1)
    DecodeKernel(const __grid_constant__ InfiniteHipLaunch p, const __grid_constant__ Rooms rooms) {
  extern __shared__ uint4 raw[];
  auto& memory = *reinterpret_cast<DecodeMemory<kHeadDim>*>(raw);
  const ChunkRow row(p, blockIdx.x / hopper::ClusterBlocks());
  const ClusterShare own(row.chooses() ? row.count : 0);
  const PageRange pages = row.PagesOf(own.begin, own.end);
  PageStream<kHeadDim> stream(p.select, row.at, pages);
  const RowReuse reuse(p.select, row.at);
  // A row that remembers may have nothing to read.
  if (!reuse.remembers()) stream.BeginEarly();
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  const int first_stage = reuse.FirstStage(row.header);
  hopper::ClusterArrive();
  if (first_stage == 0) {
    memory.bound_queries.Load(p.select, row.at, p.pages.low_weight);
  } else if (first_stage < kStages) {
    memory.queries.Load(p.select, row.at);
  }
  __syncthreads();
  hopper::ClusterWait();  // all CTAs have started and know which stages run
  if (first_stage == kStages) {
    if (hopper::ClusterRank() == 0) reuse.Recall(row.header);
    return;
  }
  DecodeStages<kHeadDim> stages(p, row, reuse, rooms, memory);
  if (first_stage == 0) {
    stages.BeginAnew();
    if (row.chooses()) stages.ScorePages(stream, pages, own);
    memory.queries.Load(p.select, row.at);  // only now: registers held bounds
  } else {
    stages.Recall(first_stage - 1);
  }
  stages.Run(first_stage);
}

template <int kHeadDim>
RowKernel<InfiniteHipLaunch, Rooms> KernelOf(const Rooms& rooms) {
  return {.kernel = DecodeKernel<kHeadDim>,
          .threads = kThreads,
          .shared_bytes = sizeof(DecodeMemory<kHeadDim>) + rooms.bytes()};
}

// Returns sizes that suffice for every row.
Rooms RoomsOf(const InfiniteHipLaunch& p) {
  // The last chunk may end after the last page. Chunks of later stages are no longer than runs.
  const int64_t pages = p.select.kv.max_blocks_per_slot + CeilPages(p.pages.chunks.chunk_tokens);
  return {.runs = static_cast<uint32_t>(p.later_chunks),
          .pages = static_cast<uint32_t>(pages),
          .first_chunks = static_cast<uint32_t>(p.max_chunks),
          .later_chunks = static_cast<uint32_t>(p.later_chunks)};
}

}  // namespace

int64_t InfiniteHipDecodeBytes(const InfiniteHipLaunch& p) {
  return static_cast<int64_t>(KernelOf<128>(RoomsOf(p)).shared_bytes);
}

cudaError_t LaunchInfiniteHipDecode(const InfiniteHipLaunch& p, cudaStream_t stream) {
  const Rooms rooms = RoomsOf(p);
  const auto kernel = ForHeadDim(p.select.kv.layout.head_dim,
                                 [&]<int kHeadDim>() { return KernelOf<kHeadDim>(rooms); });
  return LaunchRowClusters(kernel, p.select.out.num_rows, stream, p, rooms);
}

}  // namespace kvasir::kernels
