// Finds, by a CTA, the least weight that a head keeps (top_p_pruner.h). Weights are summed in bins
// by their bits. The weights in the bin where the sum reaches the need are then compared with each
// other. For the kernel of top_p.
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/base/block_sums.cuh"
#include "kernels/base/warp.cuh"
#include "kernels/sparse/common/ranking.h"
#include "kernels/sparse/top_p/top_p_rule.h"

namespace kvasir::kernels {

// A weight, at most 1, as a whole number of 2^-40. Sums of these are exact in any order.
__device__ inline uint64_t WholeOf(float weight) { return __float2ull_rn(weight * 0x1p40f); }

// Shared memory of a search.
template <int kThreads>
struct ThresholdMemory {
  static constexpr int kWarps = kThreads / kWarpThreads;
  static constexpr int kThreadBins = 4;
  static constexpr int kBins = kThreadBins * kThreads;
  static constexpr int kBinBits = std::bit_width(unsigned{kBins}) - 1;  // that the bins tell apart
  static constexpr int kFew = 256;

  // Sums of the bins, in halves: shared memory adds at most 32 bits at once.
  alignas(16) uint32_t lows[kBins];
  alignas(16) uint32_t highs[kBins];
  uint64_t before[kWarps];
  uint64_t competing[kWarps];
  uint64_t mandatory[kWarps];
  uint32_t greatest[kWarps];  // logits, OrderedScore's
  uint64_t few_wholes[kFew];
  uint32_t few[kFew];
  uint32_t num_few;
  uint32_t bin;    // where the sum from the greatest on reaches the need
  uint64_t above;  // sum of the bins above it
  uint32_t threshold;

  // By all threads.
  __device__ void ClearBins() {
    for (unsigned i = threadIdx.x; i < kBins; i += kThreads) lows[i] = highs[i] = 0;
  }
  __device__ void Add(uint32_t to, uint64_t whole) {
    const auto low = static_cast<uint32_t>(whole);
    const uint32_t old = atomicAdd(&lows[to], low);
    const uint32_t high = static_cast<uint32_t>(whole >> 32) + (old + low < low ? 1 : 0);
    if (high != 0) atomicAdd(&highs[to], high);
  }
  __device__ uint64_t SumOf(uint32_t of) const { return uint64_t{highs[of]} << 32 | lows[of]; }
};

// Weights of one head: those of the first tokens in the CTA's shared memory, the others in device
// memory.
struct HeadWeights {
  float* near;
  float* far;
  uint32_t num_near;

  __device__ float of(uint32_t j) const { return j < num_near ? near[j] : far[j]; }
  __device__ void Store(uint32_t j, float weight) const {
    if (j < num_near) {
      near[j] = weight;
    } else {
      far[j] = weight;
    }
  }
};

// The search for one head, whose logits Run turns into weights. Weights of the tokens [0,
// mandatory) are kept anyway; those of [mandatory, count) compete. All functions are called by all
// threads of the CTA.
template <int kThreads>
class ThresholdSearch {
 public:
  using Memory = ThresholdMemory<kThreads>;

  // REQUIRES: the bins are clear.
  __device__ ThresholdSearch(const HeadWeights& weights, uint32_t mandatory, uint32_t count,
                             Memory& memory)
      : weights_(weights), mandatory_(mandatory), count_(count), memory_(memory) {}

  // Returns the least weight that is kept. The memory may be used again after a barrier.
  __device__ float Run(float top_p) {
    Weigh(Greatest());
    __syncthreads();
    const unsigned lane = threadIdx.x % kWarpThreads;
    const bool has = lane < Memory::kWarps;
    const uint64_t competing = SumOverWarp(has ? memory_.competing[lane] : 0);
    const uint64_t mandatory = SumOverWarp(has ? memory_.mandatory[lane] : 0);
    const double wanted = ceil(static_cast<double>(top_p) * (1 - kTopPRounding) *
                               static_cast<double>(competing + mandatory));
    if (wanted <= static_cast<double>(mandatory)) return INFINITY;
    const uint64_t need = static_cast<uint64_t>(wanted) - mandatory;
    return need <= competing ? Find(need) : 0.0f;
  }

 private:
  // Bits of positive floats order as the floats do. A weight below the least adds nothing to a sum,
  // so no sum reaches the need at it.
  static constexpr uint32_t kLeast = 0x2b000000;  // 2^-41
  static constexpr uint32_t kMost = 0x3f800000;   // 1
  static constexpr int kFirstShift = 18;
  static_assert((kMost - kLeast) >> kFirstShift < Memory::kBins);

  // Calls use(j, of(j)) for the tokens [begin, count). Some loads are issued before the first is
  // used.
  template <typename Use>
  __device__ void ForEach(uint32_t begin, const Use& use) const {
    constexpr uint32_t kBatch = 2;
    for (uint32_t first = begin + threadIdx.x; first < count_; first += kBatch * kThreads) {
      float own[kBatch];
#pragma unroll
      for (uint32_t i = 0; i < kBatch; ++i) {
        if (first + i * kThreads < count_) own[i] = weights_.of(first + i * kThreads);
      }
#pragma unroll
      for (uint32_t i = 0; i < kBatch; ++i) {
        if (first + i * kThreads < count_) use(first + i * kThreads, own[i]);
      }
    }
  }

  // Returns the greatest logit, ignoring NaN.
  __device__ float Greatest() {
    float own = -INFINITY;
    ForEach(0, [&](uint32_t, float logit) { own = fmaxf(own, logit); });
    const uint32_t of_warp = __reduce_max_sync(kAllLanes, OrderedScore(own));
    if (threadIdx.x % kWarpThreads == 0) memory_.greatest[threadIdx.x / kWarpThreads] = of_warp;
    __syncthreads();
    const unsigned lane = threadIdx.x % kWarpThreads;
    return ScoreOfOrdered(
        __reduce_max_sync(kAllLanes, lane < Memory::kWarps ? memory_.greatest[lane] : 0));
  }

  // Returns the sum over the warp, in parts that fit 32-bit sums.
  static __device__ uint64_t SumOverWarp(uint64_t value) {
    constexpr int kPartBits = 22;
    constexpr uint32_t kPart = (1u << kPartBits) - 1;
    const auto part = [&](int i) {
      const auto bits = static_cast<uint32_t>(value >> i * kPartBits) & kPart;
      return static_cast<uint64_t>(__reduce_add_sync(kAllLanes, bits)) << i * kPartBits;
    };
    return part(0) + part(1) + part(2);
  }

  // Turns the logits into weights and sums these, by bins and in total.
  __device__ void Weigh(float greatest) {
    uint64_t competing = 0;
    uint64_t mandatory = 0;
    ForEach(0, [&](uint32_t j, float logit) {
      const float weight = expf(logit - greatest);
      weights_.Store(j, weight);
      if (isnan(weight)) return;
      const uint64_t whole = WholeOf(weight);
      if (j < mandatory_) {
        mandatory += whole;
      } else if (whole > 0) {
        competing += whole;
        memory_.Add((__float_as_uint(weight) - kLeast) >> kFirstShift, whole);
      }
    });
    competing = SumOverWarp(competing);
    mandatory = SumOverWarp(mandatory);
    if (threadIdx.x % kWarpThreads != 0) return;
    memory_.competing[threadIdx.x / kWarpThreads] = competing;
    memory_.mandatory[threadIdx.x / kWarpThreads] = mandatory;
  }

  // Returns the largest float t for which the competing weights >= t sum to at least `need`.
  // REQUIRES: all of them together reach it; need > 0; the first bins are filled.
  __device__ float Find(uint64_t need) {
    uint32_t low = kLeast;
    uint32_t high = kMost;
    int shift = kFirstShift;
    while (true) {
      FindBin(need);
      need -= memory_.above;
      low += memory_.bin << shift;
      high = min(high, low + ((1u << shift) - 1));
      if (low == high) return __uint_as_float(low);
      if (GatherFew(low, high)) return Settle(need);
      shift = max(0, shift - Memory::kBinBits);
      memory_.ClearBins();
      __syncthreads();
      ForEachBetween(low, high, [&](float weight) {
        memory_.Add((__float_as_uint(weight) - low) >> shift, WholeOf(weight));
      });
      __syncthreads();
    }
  }

  // Calls use(weight) for the competing weights with bits in [low, high], which excludes NaN.
  template <typename Use>
  __device__ void ForEachBetween(uint32_t low, uint32_t high, const Use& use) const {
    ForEach(mandatory_, [&](uint32_t, float weight) {
      const uint32_t bits = __float_as_uint(weight);
      if (bits >= low && bits <= high) use(weight);
    });
  }

  // Writes memory.bin and memory.above, visible to all threads.
  __device__ void FindBin(uint64_t need) {
    // A thread has some adjacent bins, from the greatest on.
    constexpr int kOwn = Memory::kThreadBins;
    const unsigned first = Memory::kBins - 1 - kOwn * threadIdx.x;
    uint64_t own[kOwn];
    uint64_t sum = 0;
#pragma unroll
    for (unsigned i = 0; i < kOwn; ++i) sum += own[i] = memory_.SumOf(first - i);
    if (threadIdx.x == 0) memory_.num_few = memory_.threshold = 0;
    uint64_t above = SumBefore(sum, memory_.before);
#pragma unroll
    for (unsigned i = 0; i < kOwn; ++i) {
      const uint64_t next = above + own[i];
      if (above < need && need <= next) {
        memory_.bin = first - i;
        memory_.above = above;
      }
      above = next;
    }
    __syncthreads();
  }

  // Returns whether the weights in [low, high] are few. If so, all threads see them.
  __device__ bool GatherFew(uint32_t low, uint32_t high) {
    ForEachBetween(low, high, [&](float weight) {
      const uint32_t place = atomicAdd(&memory_.num_few, 1u);
      if (place >= Memory::kFew) return;
      memory_.few[place] = __float_as_uint(weight);
      memory_.few_wholes[place] = WholeOf(weight);
    });
    __syncthreads();
    return memory_.num_few <= Memory::kFew;
  }

  // Returns the greatest of the few for which the few not below it sum to at least `need`.
  __device__ float Settle(uint64_t need) {
    static_assert(Memory::kFew <= kThreads);
    const uint32_t num_few = memory_.num_few;
    if (threadIdx.x < num_few) {
      const uint32_t own = memory_.few[threadIdx.x];
      uint64_t sum = 0;
#pragma unroll 4
      for (uint32_t i = 0; i < num_few; ++i) {
        if (memory_.few[i] >= own) sum += memory_.few_wholes[i];
      }
      if (sum >= need) atomicMax(&memory_.threshold, own);
    }
    __syncthreads();
    return __uint_as_float(memory_.threshold);
  }

  const HeadWeights weights_;
  const uint32_t mandatory_;
  const uint32_t count_;
  Memory& memory_;
};

}  // namespace kvasir::kernels
