// Internal to sampling.cu: the CTAs of a row's cluster, their shared memory, and the keys and
// buckets by which they put logits in order.
#pragma once

#include <cfloat>
#include <cstdint>

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

}  // namespace kvasir::kernels
