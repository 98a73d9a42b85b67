// Votes, and the tokens with most of them. A cluster of CTAs takes a row, each CTA some of the
// row's pages. At layer scope the votes were cast before, and each row of a layer makes the same
// choice.
//
//   cast    votes of all candidates, counted in bins; FindBin adds those of all CTAs of the cluster
//   sift    tokens in better bins than that of the last one chosen are chosen; those in its bin are
//           rivals
//   settle  rivals are counted in finer bins until they are few; then they are compared
//   list    each CTA writes the entries of its pages
//
// A rival is one integer that orders as selections must (ranking.h): votes, then the token.
#include <algorithm>

#include "kernels/base/block_sums.cuh"
#include "kernels/base/hopper.cuh"
#include "kernels/base/overlapped_launch.h"
#include "kernels/sparse/tokenselect/head_votes.cuh"
#include "kernels/sparse/tokenselect/voting_row.cuh"

namespace kvasir::kernels {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarpThreads;
constexpr int kGroup = static_cast<int>(kMaxCudaGroup);
constexpr int kBinBits = 11;
constexpr int kBins = 1 << kBinBits;
constexpr int kFewRivals = 1024;
// Bits of votes below those that tell bins apart. No vote reaches 2,048, because kMostVoters is
// less. The bins cover the greatest votes; all smaller ones share the first bin.
constexpr int kVoteShift = 19;
constexpr uint32_t kFirstBin = (0x45000000u >> kVoteShift) - kBins;
static_assert(kMostVoters < 2048);

struct alignas(16) VoteMemory {
  uint32_t bins[kBins];
  uint64_t block_sums[kWarps];
  SoftmaxSum sums[kGroup];
  uint64_t few[kFewRivals];
  uint32_t num_few;
  uint32_t num_rivals;  // of this CTA
  uint32_t num_entries;
  uint32_t bin;  // the result of FindBin, with `above` and `within`
  uint32_t above;
  uint32_t within;
};

// After VoteMemory, one for each page of the CTA.
struct ChosenPage {
  unsigned long long tokens;
  uint32_t best;  // vote
};

__device__ uint32_t BinOf(uint32_t vote) {
  const uint32_t bin = vote >> kVoteShift;
  return bin > kFirstBin ? bin - kFirstBin : 0;
}
__device__ uint64_t Rival(uint32_t vote, int64_t token) {
  return uint64_t{vote} << 32 | static_cast<uint64_t>(token);
}

// Rivals in [low, high], of which `wanted` are chosen. All rivals above are chosen.
struct Contest {
  uint64_t low;
  uint64_t high;
  uint32_t count;
  uint32_t wanted;
};

// A CTA's part of a row's choice. All functions are called by all threads of the CTA unless said
// otherwise. kHeads: most heads that vote; 0: they have voted.
template <int kHeads>
class Choice {
 public:
  __device__ Choice(const TokenSelectLaunch& p, const VotingRow& row, VoteMemory& memory)
      : p_(p),
        row_(row),
        memory_(memory),
        pages_(reinterpret_cast<ChosenPage*>(&memory + 1)),
        rank_(hopper::ClusterRank()),
        begin_page_(FirstPageOf(rank_)),
        end_page_(FirstPageOf(rank_ + 1)) {}

  // Called before Run; needs no logits.
  __device__ void Prepare() {
    ClearPages();
    ClearBins();
  }
  // Called by the whole cluster, which must meet before a CTA ends, because CTAs read each other's
  // memory.
  __device__ void Run(SelectionHeader header) {
    if constexpr (kHeads > 0) MergeParts();
    __syncthreads();  // also makes the work of Prepare visible
    if constexpr (kHeads > 0) {
      CastVotes();
    } else {
      CountVotes();
    }
    hopper::ClusterSync();
    Contest contest = {.low = 0, .high = ~uint64_t{0}, .wanted = Wanted()};
    FindBin(contest.wanted);
    contest = BinOfVotes(contest);
    Sift();
    hopper::ClusterSync();
    while (contest.count > kFewRivals && contest.count > contest.wanted) contest = Narrow(contest);
    Settle(contest);
    __syncthreads();
    header.count = static_cast<int32_t>(min(ListPages(), p_.select.out.capacity));
    if (rank_ == 0 && threadIdx.x == 0) p_.select.out.headers[row_.at.index] = header;
  }

 private:
  static constexpr int kThreadTokens = 4;
  struct Logits {
    float4 of_head[kHeads];
  };

  __device__ int64_t FirstPageOf(unsigned rank) const {
    const int64_t pages = row_.end_page() - row_.first_page();
    return row_.first_page() + min(pages, (pages + kVoteBlocks - 1) / kVoteBlocks * rank);
  }
  __device__ uint32_t Wanted() const { return static_cast<uint32_t>(row_.wanted); }
  // A CTA's rivals are stored where its first token would be.
  __device__ uint64_t* RivalsOf(unsigned rank) const {
    return p_.Rivals(row_.at.index) + FirstPageOf(rank) * kPageTokens;
  }
  __device__ uint32_t* Votes() const { return p_.votes + row_.at.index * p_.max_tokens; }
  // Returns the layer's votes for a token and the next one.
  __device__ longlong2 LayerVotes(int64_t token) const {
    const int64_t tile = static_cast<uint32_t>(row_.at.index) /
                         static_cast<uint32_t>(p_.select.kv.layout.num_kv_heads);
    return *reinterpret_cast<const longlong2*>(p_.layer_votes + tile * p_.max_tokens +
                                               (token - row_.first_page() * kPageTokens));
  }

  __device__ void ClearPages() {
    for (int64_t i = threadIdx.x; i < end_page_ - begin_page_; i += kThreads) pages_[i] = {0, 0};
    if (threadIdx.x != 0) return;
    memory_.num_rivals = 0;
    memory_.num_few = 0;
  }
  __device__ void ClearBins() {
    for (int i = static_cast<int>(threadIdx.x); i < kBins; i += kThreads) memory_.bins[i] = 0;
  }

  // Merges the parts of each head, one warp a head.
  __device__ void MergeParts() {
    const int g = static_cast<int>(threadIdx.x) / kWarpThreads;
    if (g >= kHeads) return;
    const SoftmaxSum merged =
        g < p_.select.group ? MergedParts<kWarpThreads>(p_, row_.at.index, g) : SoftmaxSum{0, 0};
    if (threadIdx.x % kWarpThreads == 0) memory_.sums[g] = merged;
  }

  // Calls use(token, load(token)) for the CTA's tokens, of which a thread has some adjacent ones.
  // kBatch loads are issued before the first is used.
  template <int kBatch, typename Load, typename Use>
  __device__ void ForEachTokens(const Load& load, const Use& use) const {
    constexpr int64_t kStep = int64_t{kThreads} * kThreadTokens;
    const int64_t end = end_page_ * kPageTokens;
    for (int64_t first = begin_page_ * kPageTokens + threadIdx.x * kThreadTokens; first < end;
         first += kBatch * kStep) {
      decltype(load(first)) loaded[kBatch] = {};
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (first + i * kStep < end) loaded[i] = load(first + i * kStep);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (first + i * kStep < end) use(first + i * kStep, loaded[i]);
      }
    }
  }
  // The same with the bits of tokens' votes.
  template <typename Use>
  __device__ void ForEachVotes(const Use& use) const {
    const auto load = [&](int64_t token) {
      if constexpr (kHeads > 0) {
        return *reinterpret_cast<const uint4*>(Votes() + token);
      } else {
        const longlong2 low = LayerVotes(token), high = LayerVotes(token + 2);
        return uint4{__float_as_uint(VoteOfUnits(low.x)), __float_as_uint(VoteOfUnits(low.y)),
                     __float_as_uint(VoteOfUnits(high.x)), __float_as_uint(VoteOfUnits(high.y))};
      }
    };
    ForEachTokens<kHeads == 0 ? 4 : 8>(load, use);  // limited by registers
  }
  __device__ bool IsCandidate(int64_t token) const {
    return token >= row_.begin && token < row_.end;
  }

  __device__ void CastVotes() {
    SoftmaxSum sums[kHeads];
#pragma unroll
    for (int g = 0; g < kHeads; ++g) sums[g] = memory_.sums[g];
    const float* const logits = p_.logits + row_.at.index * p_.logits_of_row;
    const int group = static_cast<int>(p_.select.group);
    const auto load = [&](int64_t token) {
      Logits loaded;
#pragma unroll
      for (int g = 0; g < kHeads; ++g) {
        const float* from = logits + g * p_.max_tokens + token;
        loaded.of_head[g] = g < group ? *reinterpret_cast<const float4*>(from) : float4{};
      }
      return loaded;
    };
    ForEachTokens<16 / kHeads>(load, [&](int64_t token, const Logits& loaded) {
      float4 votes = {};
#pragma unroll
      for (int g = 0; g < kHeads; ++g) AddVotes(loaded.of_head[g], sums[g], votes);
      *reinterpret_cast<float4*>(Votes() + token) = votes;
      Count(token, {__float_as_uint(votes.x), __float_as_uint(votes.y), __float_as_uint(votes.z),
                    __float_as_uint(votes.w)});
    });
  }
  __device__ void CountVotes() {
    ForEachVotes([&](int64_t token, const uint4& four) { Count(token, four); });
  }
  // Counts the candidates among adjacent tokens by their votes.
  __device__ void Count(int64_t token, const uint4& four) {
    const uint32_t votes[kThreadTokens] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < kThreadTokens; ++i) {
      if (IsCandidate(token + i)) atomicAdd(&memory_.bins[BinOf(votes[i])], 1u);
    }
  }

  // Writes to memory the bin of the `wanted`-th greatest of the votes that the cluster's CTAs
  // counted.
  __device__ void FindBin(uint32_t wanted) {
    static_assert(kBins == 4 * kThreads);
    // Thread t has four bins, from the greatest on.
    const unsigned first = kBins - 4 * (threadIdx.x + 1);
    uint32_t counts[4] = {};
#pragma unroll
    for (unsigned rank = 0; rank < kVoteBlocks; ++rank) {
      const uint4 bins =
          *reinterpret_cast<const uint4*>(hopper::OfBlock(&memory_.bins[first], rank));
      counts[0] += bins.w;
      counts[1] += bins.z;
      counts[2] += bins.y;
      counts[3] += bins.x;
    }
    const uint64_t own = uint64_t{counts[0]} + counts[1] + counts[2] + counts[3];
    auto above = static_cast<uint32_t>(SumBefore(own, memory_.block_sums));
#pragma unroll
    for (unsigned i = 0; i < 4; ++i) {
      if (above < wanted && wanted <= above + counts[i]) {
        memory_.bin = first + 3 - i;
        memory_.above = above;
        memory_.within = counts[i];
      }
      above += counts[i];
    }
    __syncthreads();
  }

  __device__ Contest BinOfVotes(const Contest& all) const {
    const uint64_t first = memory_.bin == 0 ? 0 : memory_.bin + kFirstBin;
    const uint64_t end = uint64_t{memory_.bin} + kFirstBin + 1;
    return {.low = first << (kVoteShift + 32),
            .high = (end << (kVoteShift + 32)) - 1,
            .count = memory_.within,
            .wanted = all.wanted - memory_.above};
  }

  // Chooses a token. By one thread.
  __device__ void Choose(uint32_t vote, int64_t token) {
    ChosenPage& page = pages_[token / kPageTokens - begin_page_];
    atomicOr(&page.tokens, 1ull << (token % kPageTokens));
    atomicMax(&page.best, vote);
  }

  __device__ void Sift() {
    const uint32_t last = memory_.bin;
    uint64_t* const rivals = RivalsOf(rank_);
    ForEachVotes([&](int64_t token, const uint4& four) {
      const uint32_t votes[kThreadTokens] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int i = 0; i < kThreadTokens; ++i) {
        const uint32_t bin = BinOf(votes[i]);
        if (bin < last || !IsCandidate(token + i)) continue;
        if (bin > last) {
          Choose(votes[i], token + i);
        } else {
          rivals[atomicAdd(&memory_.num_rivals, 1u)] = Rival(votes[i], token + i);
        }
      }
    });
  }

  // Returns the contest narrowed to one of 2,048 parts of its range. By the cluster.
  __device__ Contest Narrow(const Contest& contest) {
    const int shift =
        max(0, 64 - __clzll(static_cast<long long>(contest.high - contest.low)) - kBinBits);
    ClearBins();
    __syncthreads();
    const uint64_t* const rivals = RivalsOf(rank_);
    for (uint32_t i = threadIdx.x; i < memory_.num_rivals; i += kThreads) {
      const uint64_t rival = rivals[i];
      if (rival < contest.low || rival > contest.high) continue;
      atomicAdd(&memory_.bins[(rival - contest.low) >> shift], 1u);
    }
    hopper::ClusterSync();
    FindBin(contest.wanted);
    const uint64_t low = contest.low + (uint64_t{memory_.bin} << shift);
    const Contest narrowed = {.low = low,
                              .high = low + ((uint64_t{1} << shift) - 1),
                              .count = memory_.within,
                              .wanted = contest.wanted - memory_.above};
    hopper::ClusterSync();  // before bins are cleared
    return narrowed;
  }

  // Chooses among the CTA's own rivals. REQUIRES: the contest's rivals are few, or all are wanted.
  __device__ void Settle(const Contest& contest) {
    const bool all = contest.count <= contest.wanted;
    if (!all) GatherFew(contest);
    __syncthreads();
    const unsigned lane = threadIdx.x % kWarpThreads;
    const uint64_t* const rivals = RivalsOf(rank_);
    // A warp looks at several at a time, because most may be below the contest. Warps take turns,
    // because the others may be adjacent.
    const unsigned mine = lane * kWarps + threadIdx.x / kWarpThreads;
    for (uint32_t first = 0; first < memory_.num_rivals; first += kThreads) {
      const bool is_one = first + mine < memory_.num_rivals;
      const uint64_t own = is_one ? rivals[first + mine] : 0;
      unsigned left = __ballot_sync(kAllLanes, is_one && own >= contest.low);
      for (; left != 0; left &= left - 1) {
        const uint64_t rival = __shfl_sync(kAllLanes, own, __ffs(static_cast<int>(left)) - 1);
        unsigned better = 0;
        for (uint32_t j = lane; j < memory_.num_few; j += kWarpThreads) {
          better += memory_.few[j] > rival ? 1 : 0;
        }
        better = __reduce_add_sync(kAllLanes, better);
        if (lane == 0 && (all || better < contest.wanted)) {
          Choose(static_cast<uint32_t>(rival >> 32), static_cast<int64_t>(rival & 0xffffffffu));
        }
      }
    }
  }
  // Gathers the contest's rivals of all CTAs, with some threads for each CTA.
  __device__ void GatherFew(const Contest& contest) {
    constexpr unsigned kOfBlock = kThreads / kVoteBlocks;
    const unsigned rank = threadIdx.x / kOfBlock;
    const uint32_t count = *hopper::OfBlock(&memory_.num_rivals, rank);
    const uint64_t* const rivals = RivalsOf(rank);
    for (uint32_t i = threadIdx.x % kOfBlock; i < count; i += kOfBlock) {
      const uint64_t rival = __ldcg(rivals + i);
      if (rival < contest.low || rival > contest.high) continue;
      memory_.few[atomicAdd(&memory_.num_few, 1u)] = rival;
    }
  }

  // Writes the entries of the CTA's pages and returns the number of the row's. By the cluster.
  __device__ int64_t ListPages() {
    // A thread has some adjacent pages.
    const int64_t pages = end_page_ - begin_page_;
    const int64_t share = (pages + kThreads - 1) / kThreads;
    const int64_t begin = min(pages, threadIdx.x * share);
    const int64_t end = min(pages, begin + share);
    uint64_t own = 0;
    for (int64_t i = begin; i < end; ++i) own += pages_[i].tokens != 0;
    auto place = static_cast<int64_t>(SumBefore(own, memory_.block_sums));
    if (threadIdx.x == kThreads - 1) {
      memory_.num_entries = static_cast<uint32_t>(place) + static_cast<uint32_t>(own);
    }
    hopper::ClusterSync();
    int64_t all = 0;
    for (unsigned rank = 0; rank < kVoteBlocks; ++rank) {
      const uint32_t count = *hopper::OfBlock(&memory_.num_entries, rank);
      if (rank < rank_) place += count;
      all += count;
    }
    SelectionEntry* const list = p_.select.out.entries + row_.at.index * p_.select.out.capacity;
    for (int64_t i = begin; i < end; ++i) {
      const ChosenPage& page = pages_[i];
      if (page.tokens == 0) continue;
      if (place < p_.select.out.capacity) {
        list[place] = {.page = begin_page_ + i,
                       .chosen = page.tokens,
                       .live = page.tokens,
                       .score = __uint_as_float(page.best)};
      }
      ++place;
    }
    return all;
  }

  const TokenSelectLaunch& p_;
  const VotingRow& row_;
  VoteMemory& memory_;
  ChosenPage* const pages_;
  const unsigned rank_;
  const int64_t begin_page_;
  const int64_t end_page_;
};

template <int kHeads>
__global__ void __launch_bounds__(kThreads, 1)
    VotesKernel(const __grid_constant__ TokenSelectLaunch p) {
  extern __shared__ uint4 raw[];
  // The kernel begins when all CTAs of the kernel before it have waited for what came before that,
  // so only the output of that kernel is still to wait for.
  const VotingRow row(p, blockIdx.x / kVoteBlocks);
  const RowThreads threads = {.index = hopper::ClusterRank() * kThreads + threadIdx.x,
                              .count = kVoteBlocks * kThreads};
  Choice<kHeads> choice(p, row, *reinterpret_cast<VoteMemory*>(raw));
  if (row.wanted > 0) choice.Prepare();
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  if (row.wanted > 0) {
    choice.Run(row.header);
    hopper::ClusterSync();
    return RowReuse(p.select, row.at).Remember(threads);
  }
  hopper::ClusterSync();  // all CTAs know whether a list serves
  const RowReuse reuse(p.select, row.at);
  if (row.serves) return reuse.Recall(row.header, threads);
  if (threads.index == 0) p.select.out.headers[row.at.index] = row.header;
  hopper::ClusterSync();
  reuse.Remember(threads);
}

template <int kHeads>
cudaError_t Launch(const TokenSelectLaunch& p, cudaStream_t stream) {
  const int64_t pages = (p.max_tokens / kPageTokens + kVoteBlocks - 1) / kVoteBlocks;
  const int64_t shared_bytes =
      static_cast<int64_t>(sizeof(VoteMemory)) + pages * static_cast<int64_t>(sizeof(ChosenPage));
  if (const cudaError_t error = AllowSharedBytes(VotesKernel<kHeads>, shared_bytes);
      error != cudaSuccess) {
    return error;
  }
  const auto blocks = static_cast<unsigned>(p.select.out.num_rows * kVoteBlocks);
  return LaunchOverlappedClusters(VotesKernel<kHeads>, kVoteBlocks, blocks, kThreads,
                                  static_cast<size_t>(shared_bytes), stream, p);
}

}  // namespace

cudaError_t LaunchTokenVotes(const TokenSelectLaunch& p, const TokenSelectPlan& plan,
                             cudaStream_t stream) {
  if (plan.voters == 0) return Launch<0>(p, stream);
  return plan.voters == 4 ? Launch<4>(p, stream) : Launch<8>(p, stream);
}

}  // namespace kvasir::kernels
