// The search of hip on the GPU: a cluster of CTAs takes a row and works in rounds.
//
//   begin    the first CTA makes the header and the first nodes, and cuts these in halves
//   score    all CTAs: a lane takes a token of a half's centre block and finds the best of its
//            logits; adjacent lanes combine the half's
//   keep     the first CTA finds by counting the score of the last half that is kept, makes nodes
//            of the kept halves and cuts these, or writes the list
#include <algorithm>
#include <new>

#include "kernels/base/head_dim.h"
#include "kernels/base/hopper.cuh"
#include "kernels/base/overlapped_launch.h"
#include "kernels/paged/kv_codes.cuh"
#include "kernels/sparse/common/block_list.cuh"
#include "kernels/sparse/hip/hip_launch.h"
#include "kernels/sparse/hip/hip_rule.h"
#include "kernels/sparse/reuse/reuse_row.cuh"

namespace kvasir::kernels {
namespace {

constexpr unsigned kSearchBlocks = 8;  // CTAs of a cluster
constexpr int kTileQueries = 16;
constexpr int kQueriesAtOnce = 4;
static_assert(kTileQueries % kQueriesAtOnce == 0);
// Most scores of a row that are copied to shared memory before the choice. More stay in place.
constexpr int64_t kCopiedScores = 8 * 1024;

// A row and its part of the workspace.
struct SearchRow {
  __device__ SearchRow(const HipLaunch& p, uint32_t row)
      : at(p.select, row),
        header(MakeHeader(at.tile, at.numbers)),
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

template <int kHeadDim>
struct SharedMemory {
  float queries[kTileQueries][kHeadDim];
  SelectMemory select;
  alignas(SearchRow) std::byte row[sizeof(SearchRow)];  // registers would hold little else
  // In the first CTA, scores follow: [kCopiedScores] at most.
};

// --- begin, and the parts that it shares with keep: by the first CTA ---

// Cuts the row's nodes; an empty left half is dropped.
__device__ void CutNodes(const HipLaunch& p, const SearchRow& row, SelectMemory& memory) {
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
  if (threadIdx.x == kSelectThreads - 1) p.num_halves[row.at.index] = static_cast<int32_t>(place);
}

// Writes a list of all candidates, or of none, without a search.
__device__ void WriteWhole(const HipLaunch& p, const SearchRow& row) {
  const PageRange pages =
      row.wanted == 0 ? PageRange() : CandidatePages(row.header, row.at.numbers);
  SelectionHeader header = row.header;
  header.count = static_cast<int32_t>(min(pages.size(), p.select.out.capacity));
  for (int64_t i = threadIdx.x; i < header.count; i += kSelectThreads) {
    const int64_t page = pages.begin + i;
    const uint64_t mask =
        TokenMask(row.header.sink_end - page * kPageTokens, row.end - page * kPageTokens);
    row.list[i] = {.page = page, .chosen = mask, .live = mask};
  }
  if (threadIdx.x == 0) p.select.out.headers[row.at.index] = header;
}

__device__ void Begin(const HipLaunch& p, const SearchRow& row, SelectMemory& memory) {
  for (int64_t j = threadIdx.x; j < row.wanted; j += kSelectThreads) {
    const int64_t begin = HipNodeBegin(j, row.blocks, row.wanted);
    row.nodes[j] = {static_cast<int32_t>(begin),
                    static_cast<int32_t>(HipNodeBegin(j + 1, row.blocks, row.wanted) - begin)};
  }
  CutNodes(p, row, memory);
}

// --- score: by the cluster ---

// Loads the sampled queries [first, first + count) of the row, and zeros up to the tile's end.
template <int kHeadDim>
__device__ void LoadTile(const HipLaunch& p, const DeviceRow& row, int first, int count,
                         float (*to)[kHeadDim]) {
  const auto group = static_cast<int>(p.select.group);
  for (int i = static_cast<int>(threadIdx.x); i < kTileQueries * kHeadDim; i += kSelectThreads) {
    const int query = i / kHeadDim;
    const int64_t r = HipSample((first + query) / group, row.tile.num_rows);
    to[query][i % kHeadDim] =
        query < count ? QueryElement(p.select, row, r, (first + query) % group, i % kHeadDim)
                      : 0.0f;
  }
}

// Returns the i-th token of all halves' centre blocks; -1: none.
__device__ int64_t TokenAt(const SearchRow& row, int64_t i, int64_t count) {
  if (i >= count) return -1;
  const HipNode half = row.halves[i / kHipBlockTokens];
  const int64_t block = half.begin + half.length / 2;
  const int64_t token = row.header.sink_end + block * kHipBlockTokens + i % kHipBlockTokens;
  return token < row.end ? token : -1;
}

// A key as stored, in parts of eight bytes of codes or sixteen bytes of other elements.
template <typename Kv>
struct StoredKey {
  using Part = KeyVector<Kv>;
  const Part* parts;

  __device__ StoredKey(const KvLayout& layout, const std::byte* page, int64_t token)
      : parts(reinterpret_cast<const Part*>(page + token * layout.row_bytes())) {}
  __device__ Part operator[](int i) const { return parts[i]; }
};
struct CodedKey {
  using Part = KeyVector<BFloat16>;
  const uint2* parts;
  CodeScale scale;
  DType dtype;

  __device__ CodedKey(const KvLayout& layout, const std::byte* page, int64_t token)
      : parts(reinterpret_cast<const uint2*>(page + token * layout.row_bytes())),
        scale(static_cast<uint8_t>(page[layout.scales_offset() + token])),
        dtype(layout.dtype) {}
  __device__ Part operator[](int i) const {
    const uint4 elements = scale.Of(dtype == DType::kInt8 ? DecodeEight<true>(parts[i])
                                                          : DecodeEight<false>(parts[i]));
    return *reinterpret_cast<const Part*>(&elements);
  }
};

// Returns the page of a token; null if there is none.
__device__ const std::byte* FindPage(const HipLaunch& p, const DeviceRow& row, int64_t token) {
  return token < 0 ? nullptr : FindKeys(p.select, row, token / kPageTokens, p.faults);
}

// Raises `best` to the largest logit of the queries [0, count) for a key.
template <typename Key, int kHeadDim>
__device__ void RaiseBest(const Key& key, const float (*queries)[kHeadDim], int count,
                          float& best) {
  constexpr int kElements = Key::Part::kElements;
#pragma unroll 1
  for (int first = 0; first < count; first += kQueriesAtOnce) {
    float sums[kQueriesAtOnce] = {};
#pragma unroll 2
    for (int i = 0; i < kHeadDim / kElements; ++i) {
      const typename Key::Part part = key[i];
#pragma unroll
      for (int e = 0; e < kElements; e += 4) {
#pragma unroll
        for (int q = 0; q < kQueriesAtOnce; ++q) {
          const float4 x = *reinterpret_cast<const float4*>(&queries[first + q][i * kElements + e]);
          sums[q] += x.x * static_cast<float>(part.values[e]) +
                     x.y * static_cast<float>(part.values[e + 1]) +
                     x.z * static_cast<float>(part.values[e + 2]) +
                     x.w * static_cast<float>(part.values[e + 3]);
        }
      }
    }
#pragma unroll
    for (int q = 0; q < kQueriesAtOnce; ++q) {
      if (first + q < count) best = sums[q] > best ? sums[q] : best;  // not NaN
    }
  }
}

// `has_queries`: shared memory already holds all of the row's queries, from an earlier round.
template <typename Key, int kHeadDim>
__device__ void ScoreHalves(const HipLaunch& p, const SearchRow& row, bool& has_queries,
                            SharedMemory<kHeadDim>& shared) {
  const int64_t count = p.num_halves[row.at.index] * kHipBlockTokens;
  const int num_queries = static_cast<int>(NumHipSamples(row.at.tile.num_rows) * p.select.group);
  // Warps of all CTAs in turn.
  const unsigned warp = threadIdx.x / kWarpThreads * kSearchBlocks + hopper::ClusterRank();
  const unsigned thread = warp * kWarpThreads + threadIdx.x % kWarpThreads;
  for (int64_t first = 0; first < count; first += int64_t{kSearchBlocks} * kSelectThreads) {
    const int64_t i = first + thread;
    const int64_t token = TokenAt(row, i, count);
    const std::byte* const page = FindPage(p, row.at, token);
    float best = -INFINITY;
    for (int tile = 0; tile < num_queries; tile += kTileQueries) {
      const int in_tile = min(kTileQueries, num_queries - tile);
      if (!has_queries) {
        __syncthreads();  // the previous tile has been read
        LoadTile(p, row.at, tile, in_tile, shared.queries);
        __syncthreads();
        has_queries = num_queries <= kTileQueries;
      }
      if (page == nullptr) continue;
      RaiseBest(Key(p.select.kv.layout, page, token % kPageTokens), shared.queries, in_tile, best);
    }
    best = fmaxf(best, __shfl_xor_sync(kAllLanes, best, 1));
    if (i < count && i % kHipBlockTokens == 0) row.scores[i / kHipBlockTokens] = OrderedScore(best);
  }
}

// --- keep: by the first CTA ---

// Writes the list of the nodes, which are one block each.
__device__ void WriteNodes(const HipLaunch& p, const SearchRow& row, SelectMemory& memory) {
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
  const int64_t count =
      WriteList(blocks, p.select.out.capacity, memory,
                [&](int64_t place, const SelectionEntry& entry) { row.list[place] = entry; });
  if (threadIdx.x != 0) return;
  SelectionHeader header = row.header;
  header.count = static_cast<int32_t>(count);
  p.select.out.headers[row.at.index] = header;
}

// Makes nodes of the halves that are kept.
__device__ void KeepHalves(const HipLaunch& p, const SearchRow& row, SelectMemory& memory,
                           uint32_t* copied) {
  const int64_t n = p.num_halves[row.at.index];
  const bool fits = n <= kCopiedScores;
  for (int64_t i = threadIdx.x; i < n && fits; i += kSelectThreads) copied[i] = row.scores[i];
  __syncthreads();
  uint32_t* kept_scores = p.kept_scores + row.at.index * p.max_nodes;
  ForEachBest(fits ? copied : row.scores, n, row.wanted, memory,
              [&](int64_t place, int64_t half, uint32_t score) {
                row.nodes[place] = row.halves[half];
                kept_scores[place] = score;
              });
  __syncthreads();  // all nodes are there
}

template <typename Key, int kHeadDim>
__global__ void __launch_bounds__(kSelectThreads)
    SearchKernel(const __grid_constant__ HipLaunch p) {
  extern __shared__ uint4 raw[];
  auto& shared = *reinterpret_cast<SharedMemory<kHeadDim>*>(raw);
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
  auto& row = *reinterpret_cast<const SearchRow*>(shared.row);
  if (threadIdx.x == 0) new (shared.row) SearchRow(p, blockIdx.x / kSearchBlocks);
  __syncthreads();
  const bool leads = hopper::ClusterRank() == 0;
  const RowReuse reuse(p.select, row.at);
  const bool serves = reuse.Serves(row.header);
  hopper::ClusterSync();  // all CTAs know
  if (serves) {
    if (leads) reuse.Recall(row.header);
    return;
  }
  if (row.wanted >= row.blocks || row.wanted == 0) {
    if (!leads) return;
    WriteWhole(p, row);
    return reuse.Remember();
  }
  bool has_queries = false;
  if (leads) Begin(p, row, shared.select);
  int64_t longest = LongestHipNode(row.blocks, row.wanted);
  do {
    longest = LongestHipHalf(longest);
    hopper::ClusterSync();  // halves are there
    ScoreHalves<Key>(p, row, has_queries, shared);
    hopper::ClusterSync();  // scores are there
    if (leads) {
      KeepHalves(p, row, shared.select, reinterpret_cast<uint32_t*>(&shared + 1));
      if (longest > 1) CutNodes(p, row, shared.select);
    }
  } while (longest > 1);
  if (!leads) return;
  WriteNodes(p, row, shared.select);
  reuse.Remember();
}

template <typename Key, int kHeadDim>
cudaError_t Launch(const HipLaunch& p, cudaStream_t stream) {
  const auto kernel = SearchKernel<Key, kHeadDim>;
  const auto shared_bytes = static_cast<int>(
      sizeof(SharedMemory<kHeadDim>) +
      static_cast<size_t>(std::min(kCopiedScores, 2 * p.max_nodes)) * sizeof(uint32_t));
  if (const cudaError_t error = AllowSharedBytes(kernel, shared_bytes); error != cudaSuccess) {
    return error;
  }
  return LaunchOverlappedClusters(kernel, kSearchBlocks,
                                  static_cast<unsigned>(p.select.out.num_rows) * kSearchBlocks,
                                  kSelectThreads, shared_bytes, stream, p);
}

template <typename Key>
cudaError_t Launch(const HipLaunch& p, cudaStream_t stream) {
  return ForHeadDim(p.select.kv.layout.head_dim,
                    [&]<int kHeadDim>() { return Launch<Key, kHeadDim>(p, stream); });
}

}  // namespace

cudaError_t LaunchHip(const HipLaunch& p, cudaStream_t stream) {
  const DType dtype = p.select.kv.layout.dtype;
  if (IsQuantized(dtype)) return Launch<CodedKey>(p, stream);
  return dtype == DType::kFloat32 ? Launch<StoredKey<float>>(p, stream)
                                  : Launch<StoredKey<BFloat16>>(p, stream);
}

}  // namespace kvasir::kernels
