// Choosing the best of a row by a block of threads, without a sort: the k-th score is found by
// counting, and what is not below it is written in order. The order of ranking.h (rule R6): larger
// score first, then the larger number. For selectors' kernels.
#pragma once

#include <cstdint>

#include "kernels/base/block_sums.cuh"
#include "kernels/base/warp.cuh"
#include "kernels/sparse/ranking.h"

namespace kvasir::kernels {

// Of a block that does nothing else; others have fewer, a power of two.
inline constexpr int kSelectThreads = 1024;
inline constexpr int kSelectBins = 2 * kSelectThreads;

// The k-th best: `score` itself, how many items have it, and how many of these are wanted. Or a
// score below which nothing is wanted, with equal numbers.
struct SelectCut {
  uint32_t score = 0;
  uint32_t num_equal = 0;
  uint32_t num_wanted = 0;
};

// Shared memory of a block.
struct SelectMemory {
  uint32_t bins[kSelectBins];
  uint64_t sums[kSelectThreads / kWarpThreads];
  uint32_t least;
  uint32_t greatest;
  uint32_t bin;
  uint32_t above;  // items in the bins above `bin`
};

// The sum of `value` over the threads before this one.
__device__ inline uint64_t SumBefore(uint64_t value, SelectMemory& memory) {
  return SumBefore(value, memory.sums);
}

// Least and greatest score, to memory.
template <int kThreads>
__device__ void FindRange(const uint32_t* scores, int64_t n, SelectMemory& memory) {
  if (threadIdx.x == 0) {
    memory.least = ~uint32_t{0};
    memory.greatest = 0;
  }
  __syncthreads();
  uint32_t least = ~uint32_t{0};
  uint32_t greatest = 0;
#pragma unroll 1
  for (int64_t i = threadIdx.x; i < n; i += kThreads) {
    least = min(least, scores[i]);
    greatest = max(greatest, scores[i]);
  }
  least = __reduce_min_sync(kAllLanes, least);
  greatest = __reduce_max_sync(kAllLanes, greatest);
  if (threadIdx.x % kWarpThreads == 0) {
    atomicMin(&memory.least, least);
    atomicMax(&memory.greatest, greatest);
  }
  __syncthreads();
}

// Counts scores in [low, high] by bins of 2^shift, and finds the bin of the `wanted`-th greatest.
// After a barrier, `bins`, `bin` and `above` say what was found.
template <int kThreads>
__device__ void CountAndFind(const uint32_t* scores, int64_t n, uint32_t low, uint32_t high,
                             int shift, uint32_t wanted, SelectMemory& memory) {
#pragma unroll 1
  for (unsigned i = threadIdx.x; i < kSelectBins; i += kThreads) memory.bins[i] = 0;
  __syncthreads();
#pragma unroll 1
  for (int64_t i = threadIdx.x; i < n; i += kThreads) {
    const uint32_t score = scores[i];
    if (score >= low && score <= high) atomicAdd(&memory.bins[(score - low) >> shift], 1u);
  }
  __syncthreads();
  // A thread has some bins side by side, from the greatest on.
  constexpr unsigned kShare = kSelectBins / kThreads;
  const unsigned first = kSelectBins - 1 - kShare * threadIdx.x;
  uint32_t own = 0;
#pragma unroll 1
  for (unsigned i = 0; i < kShare; ++i) own += memory.bins[first - i];
  auto above = static_cast<uint32_t>(SumBefore(own, memory));
  if (above < wanted && wanted <= above + own) {
    unsigned bin = first;
    while (above + memory.bins[bin] < wanted) above += memory.bins[bin--];
    memory.bin = bin;
    memory.above = above;
  }
  __syncthreads();
}

// Cuts the range that holds the wanted score into 2,048 bins again and again: as scores are close
// together, mostly twice. Ends early where a bin's items are all wanted: then the cut is below
// all of them. REQUIRES: 1 <= count <= n.
template <int kThreads>
__device__ SelectCut FindCut(const uint32_t* scores, int64_t n, int64_t count,
                             SelectMemory& memory) {
  FindRange<kThreads>(scores, n, memory);
  uint32_t low = memory.least;
  uint32_t high = memory.greatest;
  SelectCut cut = {.score = low,
                   .num_equal = static_cast<uint32_t>(n),
                   .num_wanted = static_cast<uint32_t>(count)};
  while (low < high && cut.num_equal > cut.num_wanted) {
    const int shift = max(0, 32 - __clz(static_cast<int>(high - low)) - 11);
    CountAndFind<kThreads>(scores, n, low, high, shift, cut.num_wanted, memory);
    low += memory.bin << shift;
    high = min(high, low + ((1u << shift) - 1));
    cut = {.score = low,
           .num_equal = memory.bins[memory.bin],
           .num_wanted = cut.num_wanted - memory.above};
    __syncthreads();  // before the bins are cleared
  }
  return cut;
}

// Calls use(place, item, score) for the `count` best of scores[n], ascending by item; places are
// from 0 on. By all threads of a block; scores are OrderedScore's.
// REQUIRES: 1 <= count <= n < 2^32.
template <int kThreads = kSelectThreads, typename Use>
__device__ void ForEachBest(const uint32_t* scores, int64_t n, int64_t count, SelectMemory& memory,
                            const Use& use) {
  const SelectCut cut = FindCut<kThreads>(scores, n, count, memory);
  // Of items that have the very score of the last one, those with the larger numbers are wanted.
  const int64_t left_out = int64_t{cut.num_equal} - cut.num_wanted;
  // Odd, so that the threads of a warp read from different banks.
  const int64_t share = (static_cast<uint32_t>(n) + kThreads - 1) / kThreads | 1;
  const int64_t begin = min(n, threadIdx.x * share);
  const int64_t end = min(n, begin + share);
  uint64_t counts = 0;  // of those above, and in the lower half of those that equal
#pragma unroll 1
  for (int64_t i = begin; i < end; ++i) {
    counts += scores[i] > cut.score ? uint64_t{1} << 32 : 0;
    counts += scores[i] == cut.score ? 1 : 0;
  }
  const uint64_t before = SumBefore(counts, memory);
  auto num_equal = static_cast<int64_t>(before & 0xffffffffu);
  int64_t place = static_cast<int64_t>(before >> 32) + max(int64_t{0}, num_equal - left_out);
#pragma unroll 1
  for (int64_t i = begin; i < end; ++i) {
    const uint32_t score = scores[i];
    if (score > cut.score || (score == cut.score && num_equal++ >= left_out)) {
      use(place++, i, score);
    }
  }
}

}  // namespace kvasir::kernels
