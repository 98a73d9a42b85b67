// Chooses few of many items by a CTA (block_select.cuh defines the order). It counts only items
// that may be among the best.
//
//   bound    each thread has some adjacent items and their best. A score that about as many threads
//            reach as items are wanted, or slightly more, is one below which nothing is chosen
//   compare  the items at or above the bound, one by one
#pragma once

#include <cstdint>

#include "kernels/base/block_sums.cuh"
#include "kernels/base/warp.cuh"
#include "kernels/sparse/common/ranking.h"

namespace kvasir::kernels {

inline constexpr uint32_t kMostFew = 512;
// Comparing this many more items costs as much as looking for a better bound.
inline constexpr uint32_t kSpare = 32;

// Shared memory of a CTA.
struct FewMemory {
  uint64_t keys[kMostFew];  // score, then item: integers that order as selections must
  uint64_t sums[kWarpThreads];
  uint32_t least[kWarpThreads];  // of each warp
  uint32_t greatest[kWarpThreads];
  uint32_t chosen[kMostFew / 32];  // bit i % 32 of word i / 32: keys[i] is chosen
  uint32_t num_few;
};

class FewBest {
 public:
  __device__ FewBest(const uint32_t* scores, uint32_t n, FewMemory& memory)
      : scores_(scores),
        memory_(memory),
        lane_(threadIdx.x % kWarpThreads),
        warp_(threadIdx.x / kWarpThreads),
        // Odd, so that the threads of a warp read from different banks.
        share_((n + blockDim.x - 1) / blockDim.x | 1),
        having_((n + share_ - 1) / share_),
        begin_(min(n, threadIdx.x * share_)),
        end_(min(n, begin_ + share_)) {}

  // Calls use(place, item, score) for the `count` best, ascending by item. Returns false, calling
  // nothing, if `count` is too large or many items equal the last. By all threads of the CTA.
  // REQUIRES: 1 <= count < n < 2^32.
  template <typename Use>
  __device__ bool ForEach(uint32_t count, const Use& use) {
    if (count > kMostFew / 2 || count > having_) return false;
    const uint32_t num_few = Gather(Bound(count));
    if (num_few > kMostFew) return false;
    Compare(num_few, count);
    const uint32_t i = threadIdx.x;
    if (i >= num_few || (memory_.chosen[warp_] >> lane_ & 1) == 0) return true;
    uint32_t place = __popc(memory_.chosen[warp_] & ((1u << lane_) - 1));
    for (unsigned word = 0; word < warp_; ++word) place += __popc(memory_.chosen[word]);
    const uint64_t key = memory_.keys[i];
    use(place, static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32));
    return true;
  }

 private:
  // Returns a score that at least `count` threads, and not many more, have among their items.
  __device__ uint32_t Bound(uint32_t count) {
#pragma unroll 4
    for (uint32_t i = begin_; i < end_; ++i) best_ = max(best_, scores_[i]);
    const bool has_items = begin_ < end_;
    const uint32_t of_warp = __reduce_min_sync(kAllLanes, has_items ? best_ : ~uint32_t{0});
    const uint32_t above = __reduce_max_sync(kAllLanes, best_);
    if (lane_ == 0) {
      memory_.least[warp_] = of_warp;
      memory_.greatest[warp_] = above;
    }
    __syncthreads();
    const unsigned from = min(lane_, blockDim.x / kWarpThreads - 1);
    uint32_t low = __reduce_min_sync(kAllLanes, memory_.least[from]);  // enough threads have it
    uint32_t high = __reduce_max_sync(kAllLanes, memory_.greatest[from]);
    for (int step = 0; low < high; ++step) {
      const uint32_t middle = Middle(low, high, step);
      const auto having = static_cast<uint32_t>(__syncthreads_count(best_ >= middle));
      if (having < count) {
        high = middle - 1;
      } else {
        low = middle;
        if (having <= count + kSpare) break;
      }
    }
    return low;
  }
  // Returns a value in (low, high]. For some steps it is halfway between the scores, which lie
  // close together; then halfway between the integers, of which there are finitely many.
  __device__ static uint32_t Middle(uint32_t low, uint32_t high, int step) {
    constexpr int kStepsByScore = 12;
    const uint32_t by_score =
        OrderedScore(0.5f * ScoreOfOrdered(low) + 0.5f * ScoreOfOrdered(high));
    if (step < kStepsByScore && by_score > low && by_score <= high) return by_score;
    return low + (high - low) / 2 + 1;
  }

  // Stores the items not below `least` in keys, ascending by item, and returns their number.
  __device__ uint32_t Gather(uint32_t least) {
    uint32_t own = 0;
    const uint32_t end = best_ >= least ? end_ : begin_;
#pragma unroll 4
    for (uint32_t i = begin_; i < end; ++i) own += scores_[i] >= least ? 1 : 0;
    auto place = static_cast<uint32_t>(SumBefore(own, memory_.sums));
    if (threadIdx.x == blockDim.x - 1) memory_.num_few = place + own;
#pragma unroll 4
    for (uint32_t i = begin_; i < end; ++i) {
      const uint32_t score = scores_[i];
      if (score >= least && place < kMostFew) memory_.keys[place] = uint64_t{score} << 32 | i;
      place += score >= least ? 1 : 0;
    }
    if (threadIdx.x < kMostFew / 32) memory_.chosen[threadIdx.x] = 0;
    __syncthreads();
    return memory_.num_few;
  }

  __device__ void Compare(uint32_t num_few, uint32_t count) {
    for (uint32_t i = warp_; i < num_few; i += blockDim.x / kWarpThreads) {
      const uint64_t key = memory_.keys[i];
      unsigned better = 0;
      for (uint32_t j = lane_; j < num_few; j += kWarpThreads) {
        better += memory_.keys[j] > key ? 1 : 0;
      }
      better = __reduce_add_sync(kAllLanes, better);
      if (lane_ == 0 && better < count) atomicOr(&memory_.chosen[i / 32], 1u << (i % 32));
    }
    __syncthreads();
  }

  const uint32_t* const scores_;
  FewMemory& memory_;
  const unsigned lane_;
  const unsigned warp_;
  const uint32_t share_;
  const uint32_t having_;  // threads that have items
  const uint32_t begin_;   // of this thread's items
  const uint32_t end_;
  uint32_t best_ = 0;
};

}  // namespace kvasir::kernels
