// The search of hip on the GPU, one kernel and then two for each round of halving:
//
//   begin    a block of threads a row draws the header and the first nodes, and cuts them in halves
//   score    a lane takes a token of a half's centre block, and the best of its logits; neighbours
//            bring the half's together
//   keep     a block of threads a row finds the score of the last half that is kept, by counting,
//            makes nodes of those that are, and cuts these; or writes the list
#include <algorithm>

#include "kernels/sparse/block_list.cuh"
#include "kernels/sparse/hip/hip_launch.h"
#include "kernels/sparse/hip/hip_rule.h"
#include "kernels/sparse/key_code_logits.cuh"
#include "kernels/sparse/reuse/reuse_row.cuh"

namespace kvasir::kernels {
namespace {

constexpr int kScoreThreads = 256;
constexpr int kTileQueries = 16;
static_assert(kTileQueries % kLogitsAtOnce == 0);
// Blocks of threads that score, all rows together.
constexpr int64_t kScoreBlocks = 2048;
// Scores of a row that are chosen from in shared memory. Others stay where they are.
constexpr int64_t kCopiedScores = 8 * 1024;

// A row, and its part of the workspace.
struct SearchRow {
  __device__ SearchRow(const HipLaunch& p, uint32_t row)
      : at(p.select, row),
        header(MakeHeader(at.block, at.numbers)),
        end(header.sink_end + NumCandidates(header, at.numbers)),
        blocks(CeilHipBlocks(end - header.sink_end)),
        wanted(CeilHipBlocks(at.numbers.budget_tokens)),
        nodes(p.nodes + at.index * p.max_nodes),
        halves(p.halves + 2 * at.index * p.max_nodes),
        scores(p.scores + 2 * at.index * p.max_nodes),
        list(p.select.out.entries + at.index * p.select.out.capacity) {}

  DeviceRow at;
  SelectionHeader header;
  int64_t end;  // of the candidates
  int64_t blocks;
  int64_t wanted;
  HipNode* nodes;
  HipNode* halves;
  uint32_t* scores;
  SelectionEntry* list;
};

// --- begin, and what it shares with keep: by a block of kSelectThreads ---

// Cuts the row's nodes; an empty left half is dropped.
__device__ void CutNodes(const HipLaunch& p, const SearchRow& row, int64_t longest,
                         SelectMemory& memory) {
  __syncthreads();  // the nodes are there
  const int64_t share = (row.wanted + kSelectThreads - 1) / kSelectThreads;
  const int64_t begin = min(row.wanted, threadIdx.x * share);
  const int64_t end = min(row.wanted, begin + share);
  uint64_t own = 0;
  for (int64_t j = begin; j < end; ++j) own += row.nodes[j].length > 1 ? 2 : 1;
  uint64_t place = SumBefore(own, memory);
  for (int64_t j = begin; j < end; ++j) {
    const HipNode node = row.nodes[j];
    const int32_t left = node.length / 2;
    if (left > 0) row.halves[place++] = {node.begin, left};
    row.halves[place++] = {node.begin + left, node.length - left};
  }
  if (threadIdx.x != kSelectThreads - 1) return;
  p.num_halves[row.at.index] = static_cast<int32_t>(place);
  p.longest[row.at.index] = static_cast<int32_t>(longest);
}

// Nothing is searched: a list of all candidates, or of none.
__device__ void WriteWhole(const HipLaunch& p, SearchRow& row) {
  const PageRange pages =
      row.wanted == 0 ? PageRange() : CandidatePages(row.header, row.at.numbers);
  row.header.count = static_cast<int32_t>(min(pages.size(), p.select.out.capacity));
  for (int64_t i = threadIdx.x; i < row.header.count; i += kSelectThreads) {
    const int64_t page = pages.begin + i;
    const uint64_t mask =
        TokenMask(row.header.sink_end - page * kPageTokens, row.end - page * kPageTokens);
    row.list[i] = {.page = page, .chosen = mask, .live = mask};
  }
  if (threadIdx.x == 0) p.select.out.headers[row.at.index] = row.header;
}

__global__ void __launch_bounds__(kSelectThreads) BeginKernel(const __grid_constant__ HipLaunch p) {
  __shared__ SelectMemory memory;
  SearchRow row(p, blockIdx.x);
  const RowReuse reuse(p.select, row.at);
  if (threadIdx.x == 0) p.num_halves[row.at.index] = 0;
  if (reuse.Serves(row.header)) return reuse.Recall(row.header);
  if (row.wanted >= row.blocks || row.wanted == 0) {
    WriteWhole(p, row);
    return reuse.Remember();
  }
  __syncthreads();  // the last thread tells how many halves there are
  for (int64_t j = threadIdx.x; j < row.wanted; j += kSelectThreads) {
    const int64_t begin = HipNodeBegin(j, row.blocks, row.wanted);
    row.nodes[j] = {static_cast<int32_t>(begin),
                    static_cast<int32_t>(HipNodeBegin(j + 1, row.blocks, row.wanted) - begin)};
  }
  CutNodes(p, row, LongestHipNode(row.blocks, row.wanted), memory);
}

// --- score ---

// Sampled queries [first, first + count) of the row; zeros up to the tile.
template <int kHeadDim>
__device__ void LoadTile(const HipLaunch& p, const DeviceRow& row, int first, int count,
                         const CodeQueries<kHeadDim>& to) {
  const auto group = static_cast<int>(p.select.group);
  StoreCodeQueries(to, kTileQueries, [&](int i, int element) {
    if (i >= count) return 0.0f;
    const int64_t r = HipSample((first + i) / group, row.block.num_rows);
    return QueryElement(p.select, row, r, (first + i) % group, element);
  });
}

// The i-th token of all halves' centre blocks; -1: none.
__device__ int64_t TokenAt(const SearchRow& row, int64_t i, int64_t count) {
  if (i >= count) return -1;
  const HipNode half = row.halves[i / kHipBlockTokens];
  const int64_t block = half.begin + half.length / 2;
  const int64_t token = row.header.sink_end + block * kHipBlockTokens + i % kHipBlockTokens;
  return token < row.end ? token : -1;
}

// False where there is no key.
template <typename Kv, int kHeadDim>
__device__ bool LoadKey(const HipLaunch& p, const DeviceRow& row, int64_t token,
                        PlainKey<kHeadDim>& key) {
  if (token < 0) return false;
  const std::byte* keys = FindKeys(p.select, row, token / kPageTokens, p.faults);
  if (keys == nullptr) return false;
  constexpr int kElements = KeyVector<Kv>::kElements;
  const auto* from = reinterpret_cast<const KeyVector<Kv>*>(
      keys + token % kPageTokens * p.select.kv.layout.row_bytes());
#pragma unroll
  for (int i = 0; i < kHeadDim / kElements; ++i) {
    const KeyVector<Kv> part = from[i];
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      key.elements[i * kElements + e] = static_cast<float>(part.values[e]);
    }
  }
  return true;
}

template <typename Kv, int kHeadDim>
__global__ void __launch_bounds__(kScoreThreads, 1)
    ScoreKernel(const __grid_constant__ HipLaunch p) {
  __shared__ alignas(16) float elements[kTileQueries][kHeadDim];
  __shared__ float sums[kTileQueries];
  const CodeQueries<kHeadDim> queries = {elements, sums};
  const SearchRow row(p, blockIdx.x);
  const int64_t count = p.num_halves[row.at.index] * kHipBlockTokens;
  const int num_queries = static_cast<int>(NumHipSamples(row.at.block.num_rows) * p.select.group);
  bool is_loaded = false;
  for (int64_t first = int64_t{blockIdx.y} * kScoreThreads; first < count;
       first += int64_t{gridDim.y} * kScoreThreads) {
    const int64_t i = first + threadIdx.x;
    PlainKey<kHeadDim> key = {};
    const bool has_key = LoadKey<Kv>(p, row.at, TokenAt(row, i, count), key);
    float best = -INFINITY;
    for (int tile = 0; tile < num_queries; tile += kTileQueries) {
      const int in_tile = min(kTileQueries, num_queries - tile);
      if (!is_loaded) {
        __syncthreads();  // the tile before has been read
        LoadTile(p, row.at, tile, in_tile, queries);
        __syncthreads();
        is_loaded = num_queries <= kTileQueries;
      }
      if (!has_key) continue;
      ForEachLogit(key, queries, in_tile,
                   [&](int, float logit) { best = logit > best ? logit : best; });  // not NaN
    }
    best = fmaxf(best, __shfl_xor_sync(kAllLanes, best, 1));
    if (i < count && i % kHipBlockTokens == 0) row.scores[i / kHipBlockTokens] = OrderedScore(best);
  }
}

// --- keep ---

// The nodes are of one block each.
__device__ void WriteNodes(const HipLaunch& p, SearchRow& row, SelectMemory& memory) {
  int32_t* begins = p.begins + row.at.index * p.max_nodes;
  for (int64_t j = threadIdx.x; j < row.wanted; j += kSelectThreads) {
    begins[j] = static_cast<int32_t>(row.header.sink_end + row.nodes[j].begin * kHipBlockTokens);
  }
  __syncthreads();
  const BlockList blocks = {.begins = begins,
                            .scores = p.kept_scores + row.at.index * p.max_nodes,
                            .count = row.wanted,
                            .tokens = kHipBlockTokens,
                            .end = row.end};
  row.header.count =
      static_cast<int32_t>(WriteList(blocks, row.list, p.select.out.capacity, memory));
  if (threadIdx.x != 0) return;
  p.select.out.headers[row.at.index] = row.header;
  p.num_halves[row.at.index] = 0;
}

__global__ void __launch_bounds__(kSelectThreads) KeepKernel(const __grid_constant__ HipLaunch p) {
  __shared__ SelectMemory memory;
  extern __shared__ uint32_t copied[];  // [kCopiedScores]
  SearchRow row(p, blockIdx.x);
  const int64_t n = p.num_halves[row.at.index];
  if (n == 0) return;
  const int64_t longest = LongestHipHalf(p.longest[row.at.index]);
  const bool fits = n <= kCopiedScores;
  for (int64_t i = threadIdx.x; i < n && fits; i += kSelectThreads) copied[i] = row.scores[i];
  __syncthreads();
  uint32_t* kept_scores = p.kept_scores + row.at.index * p.max_nodes;
  ForEachBest(fits ? copied : row.scores, n, row.wanted, memory,
              [&](int64_t place, int64_t half, uint32_t score) {
                row.nodes[place] = row.halves[half];
                kept_scores[place] = score;
              });
  if (longest > 1) return CutNodes(p, row, longest, memory);
  __syncthreads();  // all nodes are there
  WriteNodes(p, row, memory);
  RowReuse(p.select, row.at).Remember();
}

template <typename Kv, int kHeadDim>
cudaError_t Launch(const HipLaunch& p, cudaStream_t stream) {
  const int64_t rows = p.select.out.num_rows;
  const int64_t tokens = 2 * p.max_nodes * kHipBlockTokens;
  const int64_t useful = std::max<int64_t>(1, (tokens + kScoreThreads - 1) / kScoreThreads);
  const int64_t share = std::max<int64_t>(1, kScoreBlocks / rows);
  const auto row_blocks = static_cast<unsigned>(rows);
  const dim3 score_blocks(row_blocks, static_cast<unsigned>(std::min(useful, share)));
  const size_t copy_bytes =
      static_cast<size_t>(std::min(kCopiedScores, 2 * p.max_nodes)) * sizeof(uint32_t);
  BeginKernel<<<row_blocks, kSelectThreads, 0, stream>>>(p);
  for (int64_t round = 0; round < p.num_rounds; ++round) {
    ScoreKernel<Kv, kHeadDim><<<score_blocks, kScoreThreads, 0, stream>>>(p);
    KeepKernel<<<row_blocks, kSelectThreads, copy_bytes, stream>>>(p);
  }
  return cudaGetLastError();
}

template <typename Kv>
cudaError_t Launch(const HipLaunch& p, cudaStream_t stream) {
  return p.select.kv.layout.head_dim == 128 ? Launch<Kv, 128>(p, stream)
                                            : Launch<Kv, 64>(p, stream);
}

}  // namespace

cudaError_t LaunchHip(const HipLaunch& p, cudaStream_t stream) {
  return p.select.kv.layout.dtype == DType::kFloat32 ? Launch<float>(p, stream)
                                                     : Launch<BFloat16>(p, stream);
}

}  // namespace kvasir::kernels
