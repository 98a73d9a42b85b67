// Internal to sampling.cu: the logits of a row, spread over the CTAs of a cluster, each of which
// has a slice of the tokens. All of sampling is made of a few questions that all threads of the
// cluster ask of all logits at once: the largest, a sum, the place in a running sum, and the
// threshold above which enough of a sum lies. Sums are of integers, so the answers equal the CPU's,
// whatever the order and the number of CTAs.
#pragma once

#include <cstdint>

#include "kernels/base/block_sums.cuh"
#include "kernels/base/hopper.cuh"
#include "kernels/base/warp.cuh"
#include "kernels/sampling/sampling_block_logits.cuh"
#include "kernels/sampling/sampling_blocks.cuh"

namespace kvasir::kernels {

// This CTA's slice of a row's logits. Its members answer for the whole row.
class Row : public BlockLogits {
 public:
  __device__ Row(const float* logits, int32_t vocab, RowMemory& memory, RowBlocks& blocks)
      : Row(logits, memory, blocks, Slice(vocab, blocks)) {}

  template <typename Measure>
  __device__ uint64_t Sum(const Measure& measure) const {
    return blocks_.Sum(BlockLogits::Sum(measure)).all;
  }

  // Returns the first token for which the sum of measure(id, logit) up to and including it exceeds
  // target_of(the sum over all), which is below that sum. Only one CTA finds it; the others return
  // -1.
  template <typename Measure, typename Target>
  __device__ int32_t LocateHere(const Measure& measure, const Target& target_of) const {
    const uint64_t own = SumByWarps(measure);
    const RowBlocks::Sums sums = blocks_.Sum(own);
    const uint64_t target = target_of(sums.all);
    if (target < sums.before || target >= sums.before + own) return -1;
    return LocateByWarps(measure, target - sums.before);
  }
  // LocateHere with the result in all CTAs.
  template <typename Measure, typename Target>
  __device__ int32_t Locate(const Measure& measure, const Target& target_of) const {
    const int32_t place = LocateHere(measure, target_of);
    return static_cast<int32_t>(blocks_.Greatest(static_cast<uint64_t>(place + 1))) - 1;
  }

  // Finds the threshold of measure(logit). `needed_of` maps the measure of all logits to the needed
  // one.
  template <typename Measure, typename Needed>
  __device__ Threshold FindThreshold(const Measure& measure, const Needed& needed_of,
                                     const Nearness& nearness) const {
    ClearBuckets();
    ForEach([&](int32_t, float logit) { AddToBucket(nearness(logit), measure(logit)); });
    Threshold found;
    uint32_t bucket = 0;
    if (!ChooseRowBucket(needed_of, &bucket, &found.needed, &found.above)) return found;
    const uint64_t count = ListBucket(nearness, bucket);
    const auto has_key = [&](int32_t, float logit) -> uint64_t {
      return KeyOf(logit) == found.key;
    };
    if (count <= kListed) {
      const BlockLogits listed(memory_.listed, 0, static_cast<int32_t>(count), memory_, false);
      if (listed.FindNear(measure, nearness, &found)) return found;
      found.key = listed.FindKey(measure, found.needed, &found.above);
      found.equals = listed.Sum(has_key);
    } else {
      const auto of_bucket = [&](float logit) {
        return nearness(logit) == bucket ? measure(logit) : 0;
      };
      const auto needed = [&](uint64_t) { return found.needed; };
      found.key = FindDigits(of_bucket, Keys{}, [&] {
        uint32_t digit = 0;
        ChooseRowBucket(needed, &digit, &found.needed, &found.above);
        hopper::ClusterSync();  // other CTAs have read this one's buckets
        return digit;
      });
      found.equals = Sum(has_key);
    }
    return found;
  }

  // Returns the shortest prefix that measures at least `needed_of` > 0.
  template <typename Measure, typename Needed>
  __device__ Prefix ShortestPrefix(const Measure& measure, const Needed& needed_of,
                                   const Nearness& nearness) const {
    const Threshold threshold = FindThreshold(measure, needed_of, nearness);
    const uint32_t key = threshold.key;
    const uint64_t each = measure(LogitOf(key));
    const uint64_t equals = (threshold.needed - threshold.above + each - 1) / each;
    if (equals == threshold.equals) return {.key = key};
    return {
        .key = key,
        .last_id = Locate([key](int32_t, float logit) -> uint64_t { return KeyOf(logit) == key; },
                          [equals](uint64_t) { return equals - 1; })};
  }

 private:
  struct Tokens {
    int32_t first, count;
  };
  __device__ static Tokens Slice(int32_t vocab, const RowBlocks& blocks) {
    const auto count = static_cast<int32_t>(blocks.count());
    const int32_t size = (vocab + kRun * count - 1) / (kRun * count) * kRun;
    const int32_t first = min(vocab, static_cast<int32_t>(blocks.rank()) * size);
    return {.first = first, .count = min(size, vocab - first)};
  }
  __device__ Row(const float* logits, RowMemory& memory, RowBlocks& blocks, const Tokens& slice)
      : BlockLogits(logits + slice.first, slice.first, slice.count, memory, true),
        blocks_(blocks) {}

  // Sends the sums of this CTA's groups of buckets to all CTAs.
  __device__ void TellGroups() const {
    const uint32_t warp = threadIdx.x / kWarpThreads, lane = threadIdx.x % kWarpThreads;
    for (uint32_t group = warp; group < kGroups; group += kSamplingWarps) {
      const uint64_t sum = SumOfLanes(BucketOf(memory_, group * kGroupBuckets + lane));
      if (lane < RowBlocks::count()) {
        *hopper::OfBlock(&memory_.groups[RowBlocks::rank()][group], lane) = sum;
      }
    }
  }

  // ChooseBucket for the sums of all CTAs' buckets. Writes the result to `bucket`, and
  // needed_of(the measure of all) to `needed`. Returns false when the sums do not reach it. Each
  // CTA finds the bucket by itself, first its group. Buckets may change after the next exchange
  // among all CTAs.
  template <typename Needed>
  __device__ bool ChooseRowBucket(const Needed& needed_of, uint32_t* bucket, uint64_t* needed,
                                  uint64_t* above) const {
    __syncthreads();  // buckets are full
    TellGroups();
    hopper::ClusterSync();
    // A thread has one CTA's sum of a group, the highest group first.
    const uint32_t lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads;
    const uint32_t block = threadIdx.x % kMaxRowBlocks;
    const uint32_t own_group = kGroups - 1 - threadIdx.x / kMaxRowBlocks;
    const uint64_t sum = block < RowBlocks::count() ? memory_.groups[block][own_group] : 0;
    const uint64_t before = *above + SumBefore(sum, memory_.sums);
    const uint64_t all = SumOfWarps();
    *needed = needed_of(all);
    if (all + *above < *needed) {
      hopper::ClusterSync();  // sums of groups have been read
      return false;
    }
    const uint64_t above_group =
        __shfl_sync(kAllLanes, before, lane / kMaxRowBlocks * kMaxRowBlocks);
    if (before < *needed && *needed <= before + sum) {
      memory_.key = own_group;
      memory_.above = above_group;
    }
    __syncthreads();
    // Each warp reads one CTA's buckets of that group, the highest first. Then all warps add them.
    const uint32_t high = memory_.key * kGroupBuckets + kGroupBuckets - 1;
    *above = memory_.above;
    if (warp < RowBlocks::count()) {
      memory_.parts[warp][lane] = BucketOf(*hopper::OfBlock(&memory_, warp), high - lane);
    }
    __syncthreads();
    uint64_t own = 0;
    for (uint32_t i = 0; i < RowBlocks::count(); ++i) own += memory_.parts[i][lane];
    uint64_t up_to = *above + own;
    for (uint32_t distance = 1; distance < kWarpThreads; distance *= 2) {
      const uint64_t left = __shfl_up_sync(kAllLanes, up_to - *above, distance);
      if (lane >= distance) up_to += left;
    }
    const int32_t chosen = __ffs(static_cast<int>(__ballot_sync(kAllLanes, *needed <= up_to))) - 1;
    *bucket = high - static_cast<uint32_t>(chosen);
    *above = __shfl_sync(kAllLanes, up_to - own, chosen);
    return true;
  }

  // Lists the logits of a bucket from all CTAs in memory_.listed, in any order, and clears the
  // buckets, unless there are more logits than fit. Returns their number.
  __device__ uint64_t ListBucket(const Nearness& nearness, uint32_t bucket) const {
    if (threadIdx.x == 0) memory_.count = 0;
    __syncthreads();
    ForEach([&](int32_t, float logit) {
      if (nearness(logit) != bucket) return;
      const uint32_t place = atomicAdd(&memory_.count, 1u);
      if (place < kListed) memory_.own_listed[place] = logit;
    });
    __syncthreads();
    const RowBlocks::Sums sums = blocks_.Sum(memory_.count);
    if (sums.all > kListed) return sums.all;
    BeginToClearBuckets();
    // Each warp copies the list of one CTA. A CTA does not change its list while others read it:
    // the next list follows an exchange among all CTAs.
    const unsigned block = threadIdx.x / kWarpThreads;
    if (block < RowBlocks::count()) {
      const uint32_t count = hopper::OfBlock(&memory_, block)->count;
      const auto first = static_cast<uint32_t>(blocks_.SumBefore(block));
      const float* const from = hopper::OfBlock(memory_.own_listed, block);
      for (uint32_t i = threadIdx.x % kWarpThreads; i < count; i += kWarpThreads) {
        memory_.listed[first + i] = from[i];
      }
    }
    __syncthreads();
    return sums.all;
  }

  RowBlocks& blocks_;
};

}  // namespace kvasir::kernels
