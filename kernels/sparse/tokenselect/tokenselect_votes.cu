// Token selection on the GPU, four kernels:
//
//   logits   a warp takes a page, so many of its lanes a key that each reads 16 bytes of it; sums
//            of the softmaxes by blocks of threads on the way
//   votes    a thread a token; counts votes by bins
//   filter   a thread a token: those in better bins than the last one chosen are chosen, those in
//            its bin are put aside
//   list     a block of threads a row chooses among these, by counting, and writes the list in the
//            order of pages: nothing is sorted
#include <algorithm>

#include "kernels/sparse/block_select.cuh"
#include "kernels/sparse/reuse/reuse_row.cuh"
#include "kernels/sparse/tokenselect/tokenselect_launch.h"
#include "kernels/sparse/tokenselect/tokenselect_selector.h"

namespace kvasir::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpThreads;
constexpr int kGroup = static_cast<int>(kMaxCudaGroup);
constexpr int kBinShift = 21;  // of an OrderedScore

// A row, and where its candidates lie.
struct VotingRow {
  __device__ VotingRow(const TokenSelectLaunch& p, uint32_t row)
      : at(p.select, row),
        header(MakeHeader(at.block, at.numbers)),
        begin(header.sink_end),
        count(NumCandidates(header, at.numbers)),
        serves(RowReuse(p.select, at).Serves(header)),
        wanted(serves ? 0 : min(count, at.numbers.budget_tokens)) {}

  __device__ int64_t first_page() const { return begin / kPageTokens; }
  __device__ int64_t end_page() const { return CeilPages(begin + count); }
  // Of a page, those that are candidates.
  __device__ uint64_t CandidatesOf(int64_t page) const {
    const int64_t start = page * kPageTokens;
    return TokenMask(begin - start, begin + count - start);
  }

  DeviceRow at;
  SelectionHeader header;
  int64_t begin;  // candidates are the tokens [begin, begin + count)
  int64_t count;
  bool serves;     // a list of an earlier step does
  int64_t wanted;  // to choose; with 0 nothing is done
};

// --- logits ---

// Adds a logit; NaN and -inf count for nothing.
__device__ void Add(SoftmaxSum& to, float logit) {
  if (!(logit > -INFINITY)) return;
  if (logit > to.max) {
    to.sum = to.sum * expf(to.max - logit) + 1;
    to.max = logit;
  } else {
    to.sum += logit == to.max ? 1.0f : expf(logit - to.max);
  }
}
__device__ SoftmaxSum Merge(const SoftmaxSum& a, const SoftmaxSum& b) {
  const float max = fmaxf(a.max, b.max);
  const auto scaled = [&](const SoftmaxSum& part) {
    return part.max == max ? part.sum : part.sum * expf(part.max - max);
  };
  return {max, scaled(a) + scaled(b)};
}
constexpr SoftmaxSum kEmptySum = {-INFINITY, 0};

template <typename Kv, int kHeadDim>
struct Lanes {
  static constexpr int kElements = KeyVector<Kv>::kElements;
  static constexpr int kOfKey = kHeadDim / kElements;
  static constexpr int kKeys = kWarpThreads / kOfKey;  // side by side
};

// The lane's elements of the mean queries, scaled.
template <typename Kv, int kHeadDim>
__device__ void LoadMeans(const SelectLaunch& p, const DeviceRow& row,
                          float (&means)[kGroup][Lanes<Kv, kHeadDim>::kElements]) {
  using L = Lanes<Kv, kHeadDim>;
  __shared__ float shared[kGroup][kHeadDim];
  for (int i = static_cast<int>(threadIdx.x); i < kGroup * kHeadDim; i += kThreads) {
    const int g = i / kHeadDim;
    shared[g][i % kHeadDim] =
        g < p.group ? MeanElement(p, row, 0, row.block.num_rows, g, i % kHeadDim) : 0.0f;
  }
  __syncthreads();
  const int part = static_cast<int>(threadIdx.x) % L::kOfKey;
#pragma unroll
  for (int g = 0; g < kGroup; ++g) {
#pragma unroll
    for (int e = 0; e < L::kElements; ++e) means[g][e] = shared[g][part * L::kElements + e];
  }
}

// The lane's own part of a page: the products of its key's and the means' elements, summed over the
// lanes of the key; lane g of a key gets head g's.
template <typename Kv, int kHeadDim>
__device__ float OwnLogit(const KeyVector<Kv>& key, int group,
                          const float (&means)[kGroup][Lanes<Kv, kHeadDim>::kElements]) {
  using L = Lanes<Kv, kHeadDim>;
  const int part = static_cast<int>(threadIdx.x) % L::kOfKey;
  float elements[L::kElements];
#pragma unroll
  for (int e = 0; e < L::kElements; ++e) elements[e] = static_cast<float>(key.values[e]);
  float own = 0;
#pragma unroll
  for (int g = 0; g < kGroup; ++g) {
    if (g >= group) break;  // the same for all lanes
    float sum = 0;
#pragma unroll
    for (int e = 0; e < L::kElements; ++e) sum += means[g][e] * elements[e];
#pragma unroll
    for (int distance = 1; distance < L::kOfKey; distance *= 2) {
      sum += __shfl_xor_sync(kAllLanes, sum, distance);
    }
    if (part == g) own = sum;
  }
  return own;
}

template <typename Kv, int kHeadDim>
__global__ void __launch_bounds__(kThreads)
    LogitsKernel(const __grid_constant__ TokenSelectLaunch p) {
  using L = Lanes<Kv, kHeadDim>;
  static_assert(L::kOfKey >= kGroup);
  __shared__ SoftmaxSum sums[kWarps * L::kKeys][kGroup];
  const VotingRow row(p, blockIdx.x);
  if (row.wanted == 0) return;
  if (blockIdx.y == 0) {
    for (int i = static_cast<int>(threadIdx.x); i < kVoteBins; i += kThreads) {
      p.bins[row.at.index * kVoteBins + i] = 0;
    }
    if (threadIdx.x == 0) p.num_close[row.at.index] = 0;
  }
  float means[kGroup][L::kElements];
  LoadMeans<Kv, kHeadDim>(p.select, row.at, means);
  const int group = static_cast<int>(p.select.group);
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int warp = static_cast<int>(threadIdx.x) / kWarpThreads;
  const int part = lane % L::kOfKey;
  const int key_of_warp = lane / L::kOfKey;
  float* const logits = p.logits + row.at.index * p.max_tokens * group;
  SoftmaxSum own = kEmptySum;  // of head `part`
  for (int64_t page = row.first_page() + int64_t{blockIdx.y} * kWarps + warp; page < row.end_page();
       page += p.blocks_of_row * kWarps) {
    const std::byte* keys = FindKeys(p.select, row.at, page, p.faults);
    const uint64_t candidates = row.CandidatesOf(page);
#pragma unroll 2
    for (int first = 0; first < kPageTokens; first += L::kKeys) {
      const int token = first + key_of_warp;
      KeyVector<Kv> key = {};
      if (keys != nullptr) {
        key = reinterpret_cast<const KeyVector<Kv>*>(keys)[token * L::kOfKey + part];
      }
      const float sum = OwnLogit<Kv, kHeadDim>(key, group, means);
      if (part < group && (candidates >> token & 1) != 0) {
        const float logit = keys != nullptr ? p.select.scale * sum : -INFINITY;
        logits[(page * kPageTokens + token - row.begin) * group + part] = logit;
        Add(own, logit);
      }
    }
  }
  if (part < kGroup) sums[warp * L::kKeys + key_of_warp][part] = own;
  __syncthreads();
  if (threadIdx.x >= static_cast<unsigned>(group)) return;
  SoftmaxSum all = kEmptySum;
  for (const auto& of_key : sums) all = Merge(all, of_key[threadIdx.x]);
  p.parts[(row.at.index * p.blocks_of_row + blockIdx.y) * group + threadIdx.x] = all;
}

// --- votes ---

// The sums of all blocks' parts, by a warp a head.
__device__ void MergeParts(const TokenSelectLaunch& p, int64_t row, SoftmaxSum (&to)[kGroup]) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int g = static_cast<int>(threadIdx.x) / kWarpThreads;
  static_assert(kWarps >= kGroup);
  if (g >= p.select.group) return;
  SoftmaxSum sum = kEmptySum;
  for (int64_t i = lane; i < p.blocks_of_row; i += kWarpThreads) {
    sum = Merge(sum, p.parts[(row * p.blocks_of_row + i) * p.select.group + g]);
  }
  for (int distance = kWarpThreads / 2; distance > 0; distance /= 2) {
    const SoftmaxSum other = {__shfl_xor_sync(kAllLanes, sum.max, distance),
                              __shfl_xor_sync(kAllLanes, sum.sum, distance)};
    sum = Merge(sum, other);
  }
  if (lane == 0) to[g] = sum;
}

// A head's vote; an infinite maximum is shared by all that have it.
__device__ float VoteOf(float logit, const SoftmaxSum& sum) {
  if (sum.sum == 0) return 0;
  const float below = logit == sum.max ? 0.0f : logit - sum.max;
  return below >= kLeastVoteExponent ? expf(below) / sum.sum : 0.0f;  // NaN: 0
}

__global__ void __launch_bounds__(kThreads)
    VotesKernel(const __grid_constant__ TokenSelectLaunch p) {
  __shared__ SoftmaxSum sums[kGroup];
  __shared__ uint32_t bins[kVoteBins];
  const VotingRow row(p, blockIdx.x);
  if (row.wanted == 0) return;
  MergeParts(p, row.at.index, sums);
  for (int i = static_cast<int>(threadIdx.x); i < kVoteBins; i += kThreads) bins[i] = 0;
  __syncthreads();
  const int group = static_cast<int>(p.select.group);
  const float* const logits = p.logits + row.at.index * p.max_tokens * group;
  for (int64_t j = int64_t{blockIdx.y} * kThreads + threadIdx.x; j < row.count;
       j += p.blocks_of_row * kThreads) {
    float vote = 0;
    for (int g = 0; g < group; ++g) vote += VoteOf(logits[j * group + g], sums[g]);
    const uint32_t ordered = OrderedScore(vote);
    p.votes[row.at.index * p.max_tokens + j] = ordered;
    // Many votes are in one bin: a warp counts them together.
    const uint32_t bin = ordered >> kBinShift;
    const unsigned same = __match_any_sync(__activemask(), bin);
    if ((same & ((1u << (threadIdx.x % kWarpThreads)) - 1)) == 0) {
      atomicAdd(&bins[bin], static_cast<uint32_t>(__popc(same)));
    }
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < kVoteBins; i += kThreads) {
    if (bins[i] != 0) atomicAdd(&p.bins[row.at.index * kVoteBins + i], bins[i]);
  }
}

// --- filter ---

// The bin of the last one chosen, and how many are in better bins. By all threads.
struct BinCut {
  uint32_t bin;
  uint32_t above;
};
template <int kNumThreads>
__device__ BinCut FindBin(const uint32_t* bins, uint32_t wanted, SelectMemory& memory) {
  constexpr int kOfThread = kVoteBins / kNumThreads;
  // Thread t has some bins, from the greatest on.
  const int first = kVoteBins - 1 - static_cast<int>(threadIdx.x) * kOfThread;
  uint32_t own = 0;
  for (int i = 0; i < kOfThread; ++i) own += bins[first - i];
  auto above = static_cast<uint32_t>(SumBefore(own, memory));
  for (int i = 0; i < kOfThread; ++i) {
    const uint32_t count = bins[first - i];
    if (above < wanted && wanted <= above + count) {
      memory.bin = static_cast<uint32_t>(first - i);
      memory.above = above;
    }
    above += count;
  }
  __syncthreads();
  return {memory.bin, memory.above};
}

__global__ void __launch_bounds__(kThreads)
    FilterKernel(const __grid_constant__ TokenSelectLaunch p) {
  __shared__ SelectMemory memory;
  const VotingRow row(p, blockIdx.x);
  if (row.wanted == 0) return;
  const BinCut cut = FindBin<kThreads>(p.bins + row.at.index * kVoteBins,
                                       static_cast<uint32_t>(row.wanted), memory);
  const int64_t row_tokens = row.at.index * p.max_tokens;
  const int64_t row_pages = row.at.index * (p.max_tokens / kPageTokens);
  auto* const chosen = reinterpret_cast<uint32_t*>(p.chosen + row_pages);
  auto* const equal = reinterpret_cast<uint32_t*>(p.equal + row_pages);
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  // A warp has half a page at a time.
  for (int64_t half =
           row.first_page() * 2 + int64_t{blockIdx.y} * kWarps + threadIdx.x / kWarpThreads;
       half < row.end_page() * 2; half += p.blocks_of_row * kWarps) {
    const int64_t j = half * kWarpThreads + lane - row.begin;
    const bool is_candidate = j >= 0 && j < row.count;
    const uint32_t vote = is_candidate ? p.votes[row_tokens + j] : 0;
    const uint32_t bin = vote >> kBinShift;
    const unsigned better = __ballot_sync(kAllLanes, is_candidate && bin > cut.bin);
    const unsigned close = __ballot_sync(kAllLanes, is_candidate && bin == cut.bin);
    if (lane == 0) {
      chosen[half] = better;
      equal[half] = 0;
    }
    if (close == 0) continue;
    uint32_t place = 0;
    if (lane == 0) {
      place = atomicAdd(&p.num_close[row.at.index], static_cast<uint32_t>(__popc(close)));
    }
    place = __shfl_sync(kAllLanes, place, 0);
    if ((close >> lane & 1) == 0) continue;
    place += static_cast<uint32_t>(__popc(close & ((1u << lane) - 1)));
    p.close[row_tokens + place] = static_cast<uint32_t>(j);
    p.close_votes[row_tokens + place] = vote;
  }
}

// --- list ---

// What a page's chosen tokens are once the first `left_out` of the equal ones are taken away;
// `before` such tokens come in pages before it.
__device__ uint64_t WithEqual(uint64_t chosen, uint64_t equal, int64_t before, int64_t left_out) {
  for (int64_t drop = min(left_out - before, int64_t{__popcll(equal)}); drop > 0; --drop) {
    equal &= equal - 1;
  }
  return chosen | equal;
}

// Chooses among the close ones: whole masks in `chosen`, those that equal the last one in `equal`.
// Returns how many of these are too many. By all threads.
__device__ int64_t ChooseClose(const TokenSelectLaunch& p, const VotingRow& row,
                               SelectMemory& memory) {
  const BinCut bin = FindBin<kSelectThreads>(p.bins + row.at.index * kVoteBins,
                                             static_cast<uint32_t>(row.wanted), memory);
  const int64_t row_tokens = row.at.index * p.max_tokens;
  const int64_t row_pages = row.at.index * (p.max_tokens / kPageTokens);
  const int64_t n = p.num_close[row.at.index];
  const uint32_t* const votes = p.close_votes + row_tokens;
  const SelectCut cut = FindCut(votes, n, row.wanted - bin.above, memory);
  for (int64_t i = threadIdx.x; i < n; i += kSelectThreads) {
    if (votes[i] < cut.score) continue;
    const int64_t token = row.begin + p.close[row_tokens + i];
    uint64_t* const masks = (votes[i] > cut.score ? p.chosen : p.equal) + row_pages;
    atomicOr(reinterpret_cast<unsigned long long*>(&masks[token / kPageTokens]),
             1ull << (token % kPageTokens));
  }
  __syncthreads();
  return int64_t{cut.num_equal} - cut.num_wanted;
}

__global__ void __launch_bounds__(kSelectThreads)
    ListKernel(const __grid_constant__ TokenSelectLaunch p) {
  __shared__ SelectMemory memory;
  const VotingRow row(p, blockIdx.x);
  SelectionHeader header = row.header;
  const RowReuse reuse(p.select, row.at);
  if (row.serves) return reuse.Recall(header);
  if (row.wanted == 0) {
    if (threadIdx.x == 0) p.select.out.headers[row.at.index] = header;
    return reuse.Remember();
  }
  const int64_t left_out = ChooseClose(p, row, memory);
  const int64_t row_pages = row.at.index * (p.max_tokens / kPageTokens);
  uint64_t* const chosen = p.chosen + row_pages;
  const uint64_t* const equal = p.equal + row_pages;
  // A thread has some pages side by side.
  const int64_t pages = row.end_page() - row.first_page();
  const int64_t share = (pages + kSelectThreads - 1) / kSelectThreads;
  const int64_t begin = row.first_page() + min(pages, threadIdx.x * share);
  const int64_t end = min(row.end_page(), begin + share);
  uint64_t own_equal = 0;
  for (int64_t page = begin; page < end; ++page) own_equal += __popcll(equal[page]);
  auto before = static_cast<int64_t>(SumBefore(own_equal, memory));
  uint64_t own_entries = 0;
  for (int64_t page = begin; page < end; ++page) {
    chosen[page] = WithEqual(chosen[page], equal[page], before, left_out);
    before += __popcll(equal[page]);
    own_entries += chosen[page] != 0;
  }
  auto place = static_cast<int64_t>(SumBefore(own_entries, memory));
  SelectionEntry* const list = p.select.out.entries + row.at.index * p.select.out.capacity;
  const uint32_t* const votes = p.votes + row.at.index * p.max_tokens;
  for (int64_t page = begin; page < end; ++page) {
    if (chosen[page] == 0) continue;
    uint32_t best = 0;
    for (uint64_t rest = chosen[page]; rest != 0; rest &= rest - 1) {
      best = max(best,
                 votes[page * kPageTokens + __ffsll(static_cast<long long>(rest)) - 1 - row.begin]);
    }
    if (place < p.select.out.capacity) {
      list[place] = {.page = page,
                     .chosen = chosen[page],
                     .live = chosen[page],
                     .score = ScoreOfOrdered(best)};
    }
    ++place;
  }
  if (threadIdx.x == kSelectThreads - 1) {  // has counted all
    header.count = static_cast<int32_t>(min(place, p.select.out.capacity));
    p.select.out.headers[row.at.index] = header;
  }
  reuse.Remember();
}

template <typename Kv>
void LaunchLogits(const TokenSelectLaunch& p, const dim3& blocks, cudaStream_t stream) {
  if (p.select.kv.layout.head_dim == 128) {
    LogitsKernel<Kv, 128><<<blocks, kThreads, 0, stream>>>(p);
  } else {
    LogitsKernel<Kv, 64><<<blocks, kThreads, 0, stream>>>(p);
  }
}

}  // namespace

cudaError_t LaunchTokenSelect(const TokenSelectLaunch& p, cudaStream_t stream) {
  const auto rows = static_cast<unsigned>(p.select.out.num_rows);
  const dim3 blocks(rows, static_cast<unsigned>(p.blocks_of_row));
  p.select.kv.layout.dtype == DType::kFloat32 ? LaunchLogits<float>(p, blocks, stream)
                                              : LaunchLogits<BFloat16>(p, blocks, stream);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  VotesKernel<<<blocks, kThreads, 0, stream>>>(p);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  FilterKernel<<<blocks, kThreads, 0, stream>>>(p);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  ListKernel<<<rows, kSelectThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace kvasir::kernels
