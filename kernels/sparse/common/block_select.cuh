// Chooses the best items of a row by a CTA, without a sort: counting finds the k-th score, and all
// items not below it are written in order. The order is that of ranking.h (rule R6): larger score
// first, then larger number. For selectors' kernels.
#pragma once

#include <cstdint>

#include "kernels/base/block_sums.cuh"
#include "kernels/base/warp.cuh"
#include "kernels/sparse/common/ranking.h"

namespace kvasir::kernels {

// Threads of a CTA that does nothing else. Other CTAs have fewer, a power of two.
inline constexpr int kSelectThreads = 1024;
inline constexpr int kSelectBins = 2 * kSelectThreads;

// Most items that a warp compares with each other.
inline constexpr uint32_t kFewItems = kWarpThreads;

// Shared memory of a CTA.
struct SelectMemory {
  uint32_t bins[kSelectBins];
  uint64_t few[kFewItems];  // score, then item: integers that order as selections must
  uint64_t sums[kSelectThreads / kWarpThreads];
  uint32_t counts[kWarpThreads];
  uint32_t least[kWarpThreads];  // of each warp
  uint32_t greatest[kWarpThreads];
  uint32_t bin;
  uint32_t above;  // items in the bins above `bin`
  uint32_t num_few;
  uint32_t item;
};

// Returns the sum of `value` over the threads before this one.
__device__ inline uint64_t SumBefore(uint64_t value, SelectMemory& memory) {
  return SumBefore(value, memory.sums);
}

// Finds the `count`-th best of scores[n]. By all threads of a CTA.
template <int kThreads>
class CutFinder {
 public:
  __device__ CutFinder(const uint32_t* scores, uint32_t n, SelectMemory& memory)
      : scores_(scores), n_(n), memory_(memory) {}

  // Returns the cut as score, then item: items below it are not among the `count` best. Cuts the
  // range that holds the wanted score into 2,048 bins until few items are left, in most calls at
  // once. REQUIRES: 1 <= count <= n.
  __device__ uint64_t Find(uint32_t count) {
    Begin();
#pragma unroll 1
    while (low_ < high_) {
      const int shift = max(0, 32 - __clz(static_cast<int>(high_ - low_)) - 11);
      FindBin(shift, count);
      low_ += memory_.bin << shift;
      high_ = min(high_, low_ + ((1u << shift) - 1));
      count -= memory_.above;
      const uint32_t num_left = memory_.bins[memory_.bin];
      if (num_left == count) return uint64_t{low_} << 32;
      if (num_left <= kFewItems) return Compare(num_left, count);
      __syncthreads();
      ClearBins();
      __syncthreads();
    }
    return OfEqual(count);
  }

 private:
  __device__ void ClearBins() const {
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < kSelectBins; i += kThreads) memory_.bins[i] = 0;
  }

  // Finds the least and the greatest score.
  __device__ void Begin() {
    ClearBins();
    if (threadIdx.x == 0) memory_.num_few = 0;
    uint32_t least = ~uint32_t{0};
    uint32_t greatest = 0;
#pragma unroll kUnroll
    for (uint32_t i = threadIdx.x; i < n_; i += kThreads) {
      least = min(least, scores_[i]);
      greatest = max(greatest, scores_[i]);
    }
    least = __reduce_min_sync(kAllLanes, least);
    greatest = __reduce_max_sync(kAllLanes, greatest);
    if (threadIdx.x % kWarpThreads == 0) {
      memory_.least[threadIdx.x / kWarpThreads] = least;
      memory_.greatest[threadIdx.x / kWarpThreads] = greatest;
    }
    __syncthreads();
    const unsigned warp = min(threadIdx.x % kWarpThreads, kThreads / kWarpThreads - 1);
    low_ = __reduce_min_sync(kAllLanes, memory_.least[warp]);
    high_ = __reduce_max_sync(kAllLanes, memory_.greatest[warp]);
  }

  __device__ bool IsIn(uint32_t score) const { return score >= low_ && score <= high_; }

  // Counts scores in bins of 2^shift and finds the bin of the `count`-th best.
  __device__ void FindBin(int shift, uint32_t count) {
#pragma unroll kUnroll
    for (uint32_t i = threadIdx.x; i < n_; i += kThreads) {
      if (IsIn(scores_[i])) atomicAdd(&memory_.bins[(scores_[i] - low_) >> shift], 1u);
    }
    __syncthreads();
    // A thread has some adjacent bins, from the greatest on.
    constexpr unsigned kShare = kSelectBins / kThreads;
    const uint32_t* const last = memory_.bins + kSelectBins - 1 - kShare * threadIdx.x;
    uint32_t own = 0;
#pragma unroll
    for (unsigned i = 0; i < kShare; ++i) own += *(last - i);
    uint32_t above = SumBefore(own, memory_.counts);
    if (above < count && count <= above + own) {
      const uint32_t* bin = last;
#pragma unroll 1
      while (above + *bin < count) above += *bin--;
      memory_.bin = static_cast<uint32_t>(bin - memory_.bins);
      memory_.above = above;
    }
    __syncthreads();
  }

  // Returns the cut among the few items in the range.
  __device__ uint64_t Compare(uint32_t num_few, uint32_t count) {
#pragma unroll kUnroll
    for (uint32_t i = threadIdx.x; i < n_; i += kThreads) {
      if (!IsIn(scores_[i])) continue;
      memory_.few[atomicAdd(&memory_.num_few, 1u)] = uint64_t{scores_[i]} << 32 | i;
    }
    __syncthreads();
    const unsigned lane = threadIdx.x % kWarpThreads;
    const uint64_t own = lane < num_few ? memory_.few[lane] : 0;
    uint32_t better = 0;
#pragma unroll 1
    for (uint32_t i = 0; i < num_few; ++i) better += memory_.few[i] > own ? 1 : 0;
    const unsigned is_last = __ballot_sync(kAllLanes, lane < num_few && better + 1 == count);
    return __shfl_sync(kAllLanes, own, __ffs(static_cast<int>(is_last)) - 1);
  }

  // Returns the cut among items that all have the score low_: the last `count` of them are chosen.
  __device__ uint64_t OfEqual(uint32_t count) {
    const uint32_t share = (n_ + kThreads - 1) / kThreads;
    const uint32_t end = n_ - min(n_, threadIdx.x * share);
    const uint32_t begin = end - min(end, share);
    uint32_t own = 0;
#pragma unroll 1
    for (uint32_t i = begin; i < end; ++i) own += scores_[i] == low_ ? 1 : 0;
    uint32_t behind = SumBefore(own, memory_.counts);
    if (behind < count && count <= behind + own) {
      uint32_t i = end;
#pragma unroll 1
      while (behind < count) behind += scores_[--i] == low_ ? 1 : 0;
      memory_.item = i;
    }
    __syncthreads();
    return uint64_t{low_} << 32 | memory_.item;
  }

  // 1,024 threads have 64 registers each.
  static constexpr int kUnroll = kThreads < kSelectThreads ? 4 : 1;

  const uint32_t* const scores_;
  const uint32_t n_;
  SelectMemory& memory_;
  uint32_t low_ = 0;
  uint32_t high_ = 0;
};

// Calls use(place, item, score) for the items of scores[n] that are not below a cut, ascending by
// item. Places count from 0.
template <int kThreads, typename Use>
__device__ void ForEachFrom(uint64_t cut, const uint32_t* scores, uint32_t n, SelectMemory& memory,
                            const Use& use) {
  const auto is_wanted = [&](uint32_t i) { return (uint64_t{scores[i]} << 32 | i) >= cut; };
  // Odd, so that the threads of a warp read from different banks.
  const uint32_t share = (n + kThreads - 1) / kThreads | 1;
  const uint32_t begin = min(n, threadIdx.x * share);
  const uint32_t end = min(n, begin + share);
  uint32_t own = 0;
#pragma unroll(kThreads < kSelectThreads ? 4 : 1)
  for (uint32_t i = begin; i < end; ++i) own += is_wanted(i) ? 1 : 0;
  int64_t place = SumBefore(own, memory.counts);
#pragma unroll 1
  for (uint32_t i = begin; i < end; ++i) {
    if (is_wanted(i)) use(place++, int64_t{i}, scores[i]);
  }
}

// The same for the `count` best. By all threads of a CTA; scores are OrderedScore's. REQUIRES: 1 <=
// count <= n < 2^32.
template <int kThreads = kSelectThreads, typename Use>
__device__ void ForEachBest(const uint32_t* scores, int64_t n, int64_t count, SelectMemory& memory,
                            const Use& use) {
  const auto num_items = static_cast<uint32_t>(n);
  const uint64_t cut =
      CutFinder<kThreads>(scores, num_items, memory).Find(static_cast<uint32_t>(count));
  ForEachFrom<kThreads>(cut, scores, num_items, memory, use);
}

}  // namespace kvasir::kernels
