// Internal to sampling.cu: the questions that the threads of one CTA answer together about its
// logits.
#pragma once

#include <cstdint>

#include "kernels/base/block_sums.cuh"
#include "kernels/base/warp.cuh"
#include "kernels/sampling/sampling_blocks.cuh"

namespace kvasir::kernels {

// Logits of consecutive tokens. All threads of the CTA call the members together.
class BlockLogits {
 public:
  // For tokens [first, first + count). `are_many`: a thread reads four at once where memory is
  // aligned to that. With few tokens that would leave all work to few threads.
  __device__ BlockLogits(const float* logits, int32_t first, int32_t count, RowMemory& memory,
                         bool are_many)
      : memory_(memory),
        logits_(logits),
        first_(first),
        count_(count),
        by_fours_(are_many && reinterpret_cast<uintptr_t>(logits) % sizeof(float4) == 0) {}

  // Calls see(id, logit) for all tokens, each by one thread. A thread has 4 kReads loads under way.
  template <int kReads = 1, typename See>
  __device__ void ForEach(const See& see) const {
    Visit<kReads>(0, count_, threadIdx.x, kSamplingThreads, see);
  }
  template <typename Measure>
  __device__ uint64_t Sum(const Measure& measure) const {
    uint64_t sum = 0;
    ForEach([&](int32_t id, float logit) { sum += measure(id, logit); });
    return BlockTotal(sum);
  }

  // The same, where each warp sums a range of its own. The warps' sums stay in memory_.sums.
  template <typename Measure>
  __device__ uint64_t SumByWarps(const Measure& measure) const {
    const int32_t warp = threadIdx.x / kWarpThreads;
    uint64_t sum = 0;
    Visit<1>(RangeBegin(warp), RangeBegin(warp + 1), threadIdx.x % kWarpThreads, kWarpThreads,
             [&](int32_t id, float logit) { sum += measure(id, logit); });
    return BlockTotal(sum);
  }
  // Called after SumByWarps. Returns the first token for which the sum of measure(id, logit) up to
  // and including it exceeds `target`. REQUIRES: the sum over all tokens does.
  template <typename Measure>
  __device__ int32_t LocateByWarps(const Measure& measure, uint64_t target) const {
    // Each warp finds the warp whose range holds the token: a lane has the sum up to one range's
    // end.
    const int32_t lane = threadIdx.x % kWarpThreads;
    uint64_t up_to = memory_.sums[lane];
    for (int distance = 1; distance < kWarpThreads; distance *= 2) {
      const uint64_t left = __shfl_up_sync(kAllLanes, up_to, distance);
      if (lane >= distance) up_to += left;
    }
    const int32_t chosen = __ffs(static_cast<int>(__ballot_sync(kAllLanes, up_to > target))) - 1;
    target -= __shfl_sync(kAllLanes, up_to, chosen) - memory_.sums[chosen];
    __syncthreads();
    if (threadIdx.x == 0) memory_.place = -1;
    const int32_t end = RangeBegin(chosen + 1);
#pragma unroll 1
    for (int32_t begin = RangeBegin(chosen); begin < end; begin += kRun * kSamplingThreads) {
      const int32_t i = begin + kRun * static_cast<int32_t>(threadIdx.x);
      uint64_t own[kRun], all = 0;
#pragma unroll
      for (int k = 0; k < kRun; ++k) {
        own[k] = i + k < end ? measure(first_ + i + k, logits_[i + k]) : 0;
        all += own[k];
      }
      uint64_t before = SumBefore(all, memory_.sums);
      for (int k = 0; k < kRun; ++k) {
        if (before <= target && target < before + own[k]) memory_.place = first_ + i + k;
        before += own[k];
      }
      __syncthreads();
      if (memory_.place >= 0) break;
      target -= SumOfWarps();
    }
    return memory_.place;
  }

  // Returns the largest key such that the logits with at least that key, and `above`, measure at
  // least `needed`. All logits together do. Adds the measure of the logits above the key to
  // `above`. REQUIRES: there is a logit.
  template <typename Measure>
  __device__ uint32_t FindKey(const Measure& measure, uint64_t needed, uint64_t* above) const {
    return FindDigits(measure, FindKeys(), [&] { return ChooseBucket(needed, above); });
  }

  // Completes a threshold, given `needed` and the measure `above` all of these logits. REQUIRES:
  // the logits lie in one bucket of `nearness` and reach `needed`; the CTA's buckets are cleared.
  // Returns false, with nothing found, when too many logits are next to the threshold.
  template <typename Measure>
  __device__ bool FindNear(const Measure& measure, const Nearness& nearness,
                           Threshold* found) const {
    ForEach([&](int32_t, float logit) { AddToBucket(nearness.Within(logit), measure(logit)); });
    if (threadIdx.x == 0) memory_.num_near = 0;
    __syncthreads();
    uint64_t above = found->above;
    const uint32_t bucket = ChooseBucket(found->needed, &above);
    ForEach([&](int32_t, float logit) {
      if (nearness.Within(logit) != bucket) return;
      const uint32_t place = atomicAdd(&memory_.num_near, 1u);
      if (place < kNear) memory_.near[place] = logit;
    });
    __syncthreads();
    const uint32_t count = memory_.num_near;
    if (count > kNear) return false;
    // Each warp by itself: a lane has a logit, and sums the measures of the larger ones.
    const uint32_t lane = threadIdx.x % kWarpThreads;
    const float logit = lane < count ? memory_.near[lane] : 0;
    const uint32_t key = lane < count ? KeyOf(logit) : 0;
    const uint64_t own = lane < count ? measure(logit) : 0;
    uint64_t equals = 0;
    for (uint32_t i = 0; i < count; ++i) {
      const uint32_t other = __shfl_sync(kAllLanes, key, i);
      const uint64_t amount = __shfl_sync(kAllLanes, own, i);
      above += other > key ? amount : 0;
      equals += other == key ? 1 : 0;
    }
    const bool is_it =
        lane < count && above < found->needed && found->needed <= above + equals * own;
    const int32_t chosen = __ffs(static_cast<int>(__ballot_sync(kAllLanes, is_it))) - 1;
    found->key = __shfl_sync(kAllLanes, key, chosen);
    found->above = __shfl_sync(kAllLanes, above, chosen);
    found->equals = __shfl_sync(kAllLanes, equals, chosen);
    return true;
  }

 protected:
  static constexpr int32_t kRun = 4;

  // Keys from `first` on that differ in their lowest `bits` bits.
  struct Keys {
    uint32_t first = 0;
    int bits = 32;
  };
  // Finds the key by digits of its distance from the first one. Calls choose() for the bucket of
  // each digit.
  template <typename Measure, typename Choose>
  __device__ uint32_t FindDigits(const Measure& measure, const Keys& keys,
                                 const Choose& choose) const {
    uint32_t found = 0;
    for (int end = keys.bits; end > 0;) {
      const int begin = max(0, end - kDigitBits);
      ClearBuckets();
      ForEach([&](int32_t, float logit) {
        const uint64_t distance = KeyOf(logit) - keys.first;
        if (distance >> end != uint64_t{found} >> end) return;
        AddToBucket(static_cast<uint32_t>(distance >> begin) & (kBuckets - 1), measure(logit));
      });
      __syncthreads();
      found |= choose() << begin;
      end = begin;
    }
    return keys.first + found;
  }

  // Returns the range of all logits' keys.
  __device__ Keys FindKeys() const {
    uint32_t least = ~0u, greatest = 0;
    ForEach([&](int32_t, float logit) {
      least = min(least, KeyOf(logit));
      greatest = max(greatest, KeyOf(logit));
    });
    const auto in_warp = [&] {
      least = __reduce_min_sync(kAllLanes, least);
      greatest = __reduce_max_sync(kAllLanes, greatest);
    };
    in_warp();
    __syncthreads();
    if (threadIdx.x % kWarpThreads == 0) {
      memory_.sums[threadIdx.x / kWarpThreads] = uint64_t{least} << 32 | greatest;
    }
    __syncthreads();
    const uint64_t of_warp = memory_.sums[threadIdx.x % kWarpThreads];
    least = static_cast<uint32_t>(of_warp >> 32);
    greatest = static_cast<uint32_t>(of_warp);
    in_warp();
    return {.first = least, .bits = max(1, 32 - __clz(static_cast<int>(greatest - least)))};
  }

  // Ends before the next __syncthreads.
  __device__ void BeginToClearBuckets() const {
    for (int i = threadIdx.x; i < kBuckets; i += kSamplingThreads) {
      memory_.bucket_low[i] = memory_.bucket_high[i] = 0;
    }
  }
  __device__ void ClearBuckets() const {
    BeginToClearBuckets();
    __syncthreads();
  }
  __device__ void AddToBucket(uint32_t bucket, uint64_t amount) const {
    if (amount == 0) return;
    const auto low = static_cast<uint32_t>(amount);
    const uint32_t sum = atomicAdd(&memory_.bucket_low[bucket], low) + low;
    const uint32_t high = static_cast<uint32_t>(amount >> 32) + (sum < low ? 1 : 0);
    if (high != 0) atomicAdd(&memory_.bucket_high[bucket], high);
  }
  __device__ static uint64_t BucketOf(const RowMemory& memory, uint32_t bucket) {
    return uint64_t{memory.bucket_high[bucket]} << 32 | memory.bucket_low[bucket];
  }

  // Returns the first bucket, from the last to the first, at which `above` and the sum reach
  // `needed`, as all together do. Sets `above` to the sum above that bucket.
  __device__ uint32_t ChooseBucket(uint64_t needed, uint64_t* above) const {
    const uint32_t high = kBuckets - 1 - 2 * threadIdx.x;
    const uint64_t sums[2] = {BucketOf(memory_, high), BucketOf(memory_, high - 1)};
    uint64_t before = *above + SumBefore(sums[0] + sums[1], memory_.sums);
    for (uint32_t i = 0; i < 2; ++i) {
      if (before < needed && needed <= before + sums[i]) {
        memory_.key = high - i;
        memory_.above = before;
      }
      before += sums[i];
    }
    __syncthreads();
    *above = memory_.above;
    return memory_.key;
  }

  // Returns the total of memory_.sums to all threads.
  __device__ uint64_t SumOfWarps() const {
    return SumOfLanes(memory_.sums[threadIdx.x % kWarpThreads]);
  }
  // Returns the total of the threads' values. Each warp's total stays in memory_.sums.
  __device__ uint64_t BlockTotal(uint64_t value) const {
    value = SumOfLanes(value);
    __syncthreads();
    if (threadIdx.x % kWarpThreads == 0) memory_.sums[threadIdx.x / kWarpThreads] = value;
    __syncthreads();
    return SumOfWarps();
  }

  RowMemory& memory_;

 private:
  // Returns the start of a warp's range of the tokens.
  __device__ int32_t RangeBegin(int32_t warp) const {
    const int32_t range = (count_ + kRun * kSamplingWarps - 1) / (kRun * kSamplingWarps) * kRun;
    return min(count_, warp * range);
  }

  // Calls see(id, logit) for tokens [begin, end), relative to the first one, by `count` threads, of
  // which this is number `number`. `begin` is a multiple of 4.
  template <int kReads, typename See>
  __device__ void Visit(int32_t begin, int32_t end, uint32_t number, int32_t count,
                        const See& see) const {
    int32_t i = begin + static_cast<int32_t>(number);
    if (by_fours_ && begin < end) {
      const int32_t runs = (end - begin) / 4;
      const auto* const run = reinterpret_cast<const float4*>(logits_ + begin);
#pragma unroll kReads
      for (int32_t r = static_cast<int32_t>(number); r < runs; r += count) {
        const float4 values = run[r];
        const int32_t id = first_ + begin + 4 * r;
        see(id, values.x);
        see(id + 1, values.y);
        see(id + 2, values.z);
        see(id + 3, values.w);
      }
      i += 4 * runs;
    }
#pragma unroll 1
    for (; i < end; i += count) see(first_ + i, logits_[i]);
  }

  const float* const logits_;
  const int32_t first_, count_;
  const bool by_fours_;
};

}  // namespace kvasir::kernels
