// Internal to sampling.cu: the logits of a row, spread over the CTAs of a cluster, each of which
// has a slice of the tokens. All of sampling is made of a few questions that all threads of the
// cluster ask of all logits at once: the largest, a sum, the place in a running sum, and the
// threshold above which enough of a sum lies. Sums are of integers, so the answers equal the CPU's,
// whatever the order and the number of CTAs.
#pragma once

#include <cfloat>
#include <cstdint>

#include "kernels/base/block_sums.cuh"
#include "kernels/base/hopper.cuh"
#include "kernels/base/warp.cuh"

namespace kvasir::kernels {

inline constexpr int kSamplingThreads = 1024;  // of a CTA
inline constexpr int kSamplingWarps = kSamplingThreads / kWarpThreads;
static_assert(kSamplingWarps == kWarpThreads);
inline constexpr unsigned kMaxRowBlocks = 16;
inline constexpr unsigned kPortableRowBlocks = 8;  // largest cluster that every GPU allows

// Thresholds are found digit by digit of a key, from the highest digit on.
inline constexpr int kDigitBits = 11;
inline constexpr int kBuckets = 1 << kDigitBits;
static_assert(kBuckets == 2 * kSamplingThreads);

// Larger logits have larger keys, and equal ones (0 and -0) equal keys. Not for NaN.
__device__ inline uint32_t KeyOf(float logit) {
  const uint32_t bits = __float_as_uint(logit + 0.0f);
  return bits >> 31 == 0 ? bits | 0x80000000u : ~bits;
}
__device__ inline float LogitOf(uint32_t key) {
  return __uint_as_float(key >> 31 == 0 ? ~key : key & 0x7fffffffu);
}

// Returns the sum to all lanes of a warp.
__device__ inline uint64_t SumOfLanes(uint64_t value) {
  for (int distance = kWarpThreads / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, distance);
  }
  return value;
}
__device__ inline uint64_t GreatestOfLanes(uint64_t value) {
  for (int distance = kWarpThreads / 2; distance > 0; distance /= 2) {
    value = max(value, __shfl_xor_sync(kAllLanes, value, distance));
  }
  return value;
}

// The lanes of a warp examine the buckets of one group.
inline constexpr int kGroupBuckets = kWarpThreads;
inline constexpr int kGroups = kBuckets / kGroupBuckets;
static_assert(kGroups * kMaxRowBlocks == kSamplingThreads);

// Most logits of one bucket that are examined separately, and most of a bucket of these, one by
// each lane of a warp.
inline constexpr uint32_t kListed = 2048;
inline constexpr uint32_t kNear = kWarpThreads;

// Shared memory of one CTA of the cluster.
struct RowMemory {
  uint64_t sums[kSamplingWarps];
  // Sums of 64 bits in two words, because shared memory adds 32 bits at a time.
  uint32_t bucket_low[kBuckets], bucket_high[kBuckets];
  alignas(16) float own_listed[kListed];         // of the CTA's slice
  alignas(16) float listed[kListed];             // of all slices
  uint64_t told[2][kMaxRowBlocks];               // values of the cluster's CTAs, in two turns
  uint64_t groups[kMaxRowBlocks][kGroups];       // by CTA: sums of its groups of buckets
  uint64_t parts[kMaxRowBlocks][kGroupBuckets];  // by CTA: its buckets of one group
  float near[kNear];
  uint32_t num_near;
  // Written by one thread for the others.
  uint64_t above;
  uint32_t key;
  int32_t place;
  uint32_t count;
};

// The CTAs of a row. All of them make the same calls in the same order.
class RowBlocks {
 public:
  __device__ explicit RowBlocks(RowMemory& memory) : memory_(memory) {}

  // Read each time, because registers are scarce.
  __device__ static unsigned rank() { return hopper::ClusterRank(); }
  __device__ static unsigned count() { return hopper::ClusterBlocks(); }

  // Begin and AwaitBegin make sure that all CTAs run before any of them writes to another.
  __device__ void Begin() const { hopper::ClusterArriveBare(); }
  __device__ void AwaitBegin() const { hopper::ClusterWait(); }

  __device__ uint64_t Greatest(uint64_t value) { return GreatestOfLanes(Exchange(value)); }
  // The sum over all CTAs, and over the CTAs before this one.
  struct Sums {
    uint64_t all = 0;
    uint64_t before = 0;
  };
  __device__ Sums Sum(uint64_t value) {
    const uint64_t told = Exchange(value);
    const bool is_before = threadIdx.x % kWarpThreads < rank();
    return {.all = SumOfLanes(told), .before = SumOfLanes(is_before ? told : 0)};
  }
  // Returns the sum over the CTAs before number `block`, for the values of the last call of Sum.
  __device__ uint64_t SumBefore(unsigned block) const {
    const unsigned lane = threadIdx.x % kWarpThreads;
    return SumOfLanes(lane < block ? memory_.told[turn_ ^ 1][lane] : 0);
  }

 private:
  // Sends this CTA's value, the same in all its threads, to all CTAs. Lane i of a warp gets the
  // value of CTA i, or 0 where there is none.
  __device__ uint64_t Exchange(uint64_t value) {
    uint64_t* const told = memory_.told[turn_];
    turn_ ^= 1;
    if (threadIdx.x < count()) *hopper::OfBlock(told + rank(), threadIdx.x) = value;
    hopper::ClusterSync();
    const unsigned lane = threadIdx.x % kWarpThreads;
    return lane < count() ? told[lane] : 0;
  }

  RowMemory& memory_;
  uint32_t turn_ = 0;
};

// The buckets of logits by their distance from the largest: a smaller logit never lies in a higher
// bucket. Buckets are of equal width; by the digits of floats most logits would share a few.
struct Nearness {
  float max;
  float buckets_per_unit;

  __device__ uint32_t operator()(float logit) const {
    return kBuckets - 1 - static_cast<uint32_t>(Distance(logit));
  }
  // The same within a logit's bucket. The lowest bucket, which holds all far logits, is one bucket.
  __device__ uint32_t Within(float logit) const {
    const float far = Distance(logit);
    // The difference and the product are exact.
    return kBuckets - 1 - static_cast<uint32_t>((far - floorf(far)) * kBuckets);
  }

 private:
  __device__ float Distance(float logit) const {
    return fminf((max - logit) * buckets_per_unit, static_cast<float>(kBuckets - 1));
  }
};

// A prefix of the tokens in order of (larger logit, smaller id): its smallest key, and the last id
// of a token with that key.
struct Prefix {
  uint32_t key = 0;
  int32_t last_id = INT32_MAX;  // among tokens with that key

  __device__ bool Has(int32_t id, uint32_t token_key) const {
    return token_key > key || (token_key == key && id <= last_id);
  }
};

// The largest key such that the tokens with at least that key measure at least `needed` > 0, the
// measure of those above it, and the number of tokens with that key. Key 0, which all tokens reach,
// if all together measure less.
struct Threshold {
  uint32_t key = 0;
  uint64_t needed = 0;
  uint64_t above = 0;
  uint64_t equals = 0;
};

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
