// Sampling on the GPU, a block of threads a row. Everything is made of a few questions to all
// logits of the row at once: their largest, a sum, the place in a running sum, the threshold above
// which enough of a sum lies. Sums are of integers, so they are the CPU's whatever their order.
// Compiled without fused multiply-add, as sampling_weights.h wants it.
#include <cfloat>

#include "kernels/base/block_sums.cuh"
#include "kernels/base/warp.cuh"
#include "kernels/dense/sampling_launch.h"

namespace kvasir::kernels {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarpThreads;
static_assert(kWarps == kWarpThreads);
constexpr float kBanned = -INFINITY;

// Thresholds are found digit by digit of a key, from the highest on.
constexpr int kDigits = 3;
constexpr int kDigitBits = 11;
constexpr int kBuckets = 1 << kDigitBits;
static_assert(kDigits * kDigitBits >= 32 && kBuckets == 2 * kThreads);

// Larger logits have larger keys, equal ones (0 and -0) the same. Not for NaN.
__device__ uint32_t KeyOf(float logit) {
  const uint32_t bits = __float_as_uint(logit + 0.0f);
  return bits >> 31 == 0 ? bits | 0x80000000u : ~bits;
}
__device__ float LogitOf(uint32_t key) {
  return __uint_as_float(key >> 31 == 0 ? ~key : key & 0x7fffffffu);
}

// So many logits of one bucket are looked at by themselves.
constexpr uint32_t kListed = 4096;

struct SharedMemory {
  uint64_t sums[kWarps];
  uint64_t buckets[kBuckets];
  alignas(16) float listed[kListed];
  // What one thread tells the others.
  uint64_t above;
  uint32_t key;
  int32_t place;
  uint32_t count;
};

// The buckets that logits fall into by their distance from the largest: no logit lies in a higher
// one than a larger logit does. Even ones, where the digits of floats would heap most logits up.
struct Nearness {
  float max;
  float buckets_per_unit;

  __device__ uint32_t operator()(float logit) const {
    const float far = fminf((max - logit) * buckets_per_unit, static_cast<float>(kBuckets - 1));
    return kBuckets - 1 - static_cast<uint32_t>(far);
  }
};

// By all threads of the block: the largest value, for all of them.
__device__ uint64_t BlockMax(uint64_t value, SharedMemory& shared) {
  for (int distance = kWarpThreads / 2; distance > 0; distance /= 2) {
    const uint64_t other = __shfl_xor_sync(kAllLanes, value, distance);
    value = other > value ? other : value;
  }
  __syncthreads();
  if (threadIdx.x % kWarpThreads == 0) shared.sums[threadIdx.x / kWarpThreads] = value;
  __syncthreads();
  for (int warp = 0; warp < kWarps; ++warp) {
    value = shared.sums[warp] > value ? shared.sums[warp] : value;
  }
  return value;
}

// A smallest key, and in order of id the last token, that belong to a prefix of the tokens in order
// of (larger logit, smaller id).
struct Prefix {
  uint32_t key = 0;
  int32_t last_id = INT32_MAX;  // among tokens with that key

  __device__ bool Has(int32_t id, uint32_t token_key) const {
    return token_key > key || (token_key == key && id <= last_id);
  }
};

// The logits of one row, asked by all threads of the block together.
class Row {
 public:
  __device__ Row(const float* logits, int32_t vocab, SharedMemory& shared)
      : logits_(logits), vocab_(vocab), shared_(shared) {}

  __device__ float at(int32_t id) const { return logits_[id]; }

  // Calls see(id, logit) for all tokens, each by one thread.
  template <typename See>
  __device__ void ForEach(const See& see) const {
    Visit(0, vocab_, threadIdx.x, kThreads, see);
  }

  template <typename Measure>
  __device__ uint64_t Sum(const Measure& measure) const {
    uint64_t sum = 0;
    ForEach([&](int32_t id, float logit) { sum += measure(id, logit); });
    return BlockTotal(sum);
  }

  // The first token that makes the sum of measure(id, logit) over it and those before it exceed
  // `target`. REQUIRES: the sum over all does.
  template <typename Measure>
  __device__ int32_t Locate(const Measure& measure, uint64_t target) const {
    // By warps first, each over a range of its own; then, by all of them, in the range.
    constexpr int32_t kRun = 4;
    const int32_t range = (vocab_ + kRun * kWarps - 1) / (kRun * kWarps) * kRun;
    const auto begin_of = [&](int32_t warp) { return min(vocab_, warp * range); };
    const int32_t warp = threadIdx.x / kWarpThreads;
    uint64_t sum = 0;
    Visit(begin_of(warp), begin_of(warp + 1), threadIdx.x % kWarpThreads, kWarpThreads,
          [&](int32_t id, float logit) { sum += measure(id, logit); });
    BlockTotal(sum);
    int32_t chosen = 0;
    while (chosen < kWarps - 1 && shared_.sums[chosen] <= target) target -= shared_.sums[chosen++];
    __syncthreads();
    if (threadIdx.x == 0) shared_.place = -1;
    const int32_t end = begin_of(chosen + 1);
    for (int32_t first = begin_of(chosen); first < end; first += kRun * kThreads) {
      const int32_t id = first + kRun * static_cast<int32_t>(threadIdx.x);
      uint64_t own[kRun], all = 0;
      for (int i = 0; i < kRun; ++i) {
        own[i] = id + i < end ? measure(id + i, logits_[id + i]) : 0;
        all += own[i];
      }
      uint64_t before = SumBefore(all, shared_.sums);
      for (int i = 0; i < kRun; ++i) {
        if (before <= target && target < before + own[i]) shared_.place = id + i;
        before += own[i];
      }
      __syncthreads();
      if (shared_.place >= 0) break;
      for (int i = 0; i < kWarps; ++i) target -= shared_.sums[i];
    }
    return shared_.place;
  }

  // The largest key such that tokens with keys from it on measure `needed` > 0 at least, and what
  // those above it measure; key 0 if all together do not.
  struct Threshold {
    uint32_t key = 0;
    uint64_t needed = 0;
    uint64_t above = 0;
  };
  // By measure(logit); `needed_of` is asked for what all measure.
  template <typename Measure, typename Needed>
  __device__ Threshold FindThreshold(const Measure& measure, const Needed& needed_of,
                                     const Nearness& nearness) const {
    ClearBuckets();
    ForEach([&](int32_t, float logit) { AddToBucket(nearness(logit), measure(logit)); });
    __syncthreads();
    Threshold found;
    found.needed = needed_of(
        BlockTotal(shared_.buckets[threadIdx.x] + shared_.buckets[threadIdx.x + kThreads]));
    if (!ChooseBucket(found.needed, &found.above)) return found;
    const uint32_t bucket = shared_.key;
    if (threadIdx.x == 0) shared_.count = 0;
    __syncthreads();
    ForEach([&](int32_t, float logit) {
      if (nearness(logit) != bucket) return;
      const uint32_t place = atomicAdd(&shared_.count, 1u);
      if (place < kListed) shared_.listed[place] = logit;
    });
    __syncthreads();
    const uint32_t count = shared_.count;
    found.key =
        count <= kListed
            ? Row(shared_.listed, static_cast<int32_t>(count), shared_)
                  .FindKey(measure, found.needed, &found.above)
            : FindKey([&](float logit) { return nearness(logit) == bucket ? measure(logit) : 0; },
                      found.needed, &found.above);
    return found;
  }

  // The shortest prefix that measures `needed_of` > 0 at least.
  template <typename Measure, typename Needed>
  __device__ Prefix ShortestPrefix(const Measure& measure, const Needed& needed_of,
                                   const Nearness& nearness, uint64_t* total) const {
    const Threshold threshold = FindThreshold(measure, needed_of, nearness);
    const uint32_t key = threshold.key;
    const uint64_t each = measure(LogitOf(key));
    const uint64_t equals = (threshold.needed - threshold.above + each - 1) / each;
    *total = threshold.above + equals * each;
    return {
        .key = key,
        .last_id = Locate([key](int32_t, float logit) -> uint64_t { return KeyOf(logit) == key; },
                          equals - 1)};
  }

 private:
  // Calls see(id, logit) for the tokens of [begin, end), by `count` threads of which this one is
  // number `number`. `begin` is a multiple of 4.
  template <typename See>
  __device__ void Visit(int32_t begin, int32_t end, uint32_t number, int32_t count,
                        const See& see) const {
    int32_t id = begin + static_cast<int32_t>(number);
    if (reinterpret_cast<uintptr_t>(logits_) % sizeof(float4) == 0 && begin < end) {
      const int32_t runs = (end - begin) / 4;
      const auto* const run = reinterpret_cast<const float4*>(logits_ + begin);
#pragma unroll 2
      for (int32_t i = static_cast<int32_t>(number); i < runs; i += count) {
        const float4 values = run[i];
        see(begin + 4 * i, values.x);
        see(begin + 4 * i + 1, values.y);
        see(begin + 4 * i + 2, values.z);
        see(begin + 4 * i + 3, values.w);
      }
      id += 4 * runs;
    }
    for (; id < end; id += count) see(id, logits_[id]);
  }

  __device__ void ClearBuckets() const {
    shared_.buckets[threadIdx.x] = shared_.buckets[threadIdx.x + kThreads] = 0;
    __syncthreads();
  }
  __device__ void AddToBucket(uint32_t bucket, uint64_t amount) const {
    if (amount == 0) return;
    atomicAdd(reinterpret_cast<unsigned long long*>(&shared_.buckets[bucket]),
              static_cast<unsigned long long>(amount));
  }

  // The threshold's key, digit by digit; `above` is what is known to lie above all of these logits.
  template <typename Measure>
  __device__ uint32_t FindKey(const Measure& measure, uint64_t needed, uint64_t* above) const {
    uint32_t key = 0;
    for (int digit = kDigits - 1; digit >= 0; --digit) {
      const int shift = digit * kDigitBits;
      ClearBuckets();
      ForEach([&](int32_t, float logit) {
        const uint32_t other = KeyOf(logit);
        const uint64_t higher = uint64_t{other} >> (shift + kDigitBits);
        if (higher != uint64_t{key} >> (shift + kDigitBits)) return;
        AddToBucket(other >> shift & (kBuckets - 1), measure(logit));
      });
      __syncthreads();
      ChooseBucket(needed, above);  // which they reach
      key |= shared_.key << shift;
    }
    return key;
  }

  // What the threads' values add up to; those of each warp stay in shared_.sums.
  __device__ uint64_t BlockTotal(uint64_t value) const {
    for (int distance = kWarpThreads / 2; distance > 0; distance /= 2) {
      value += __shfl_xor_sync(kAllLanes, value, distance);
    }
    __syncthreads();
    if (threadIdx.x % kWarpThreads == 0) shared_.sums[threadIdx.x / kWarpThreads] = value;
    __syncthreads();
    value = 0;
    for (int warp = 0; warp < kWarps; ++warp) value += shared_.sums[warp];
    return value;
  }

  // Of the buckets, from the last to the first, the one where `above` and their sum reach `needed`:
  // to shared_.key, and what lies above it to `above`. False: they do not.
  __device__ bool ChooseBucket(uint64_t needed, uint64_t* above) const {
    const uint32_t high = kBuckets - 1 - 2 * threadIdx.x;
    const uint64_t sums[2] = {shared_.buckets[high], shared_.buckets[high - 1]};
    uint64_t before = *above + SumBefore(sums[0] + sums[1], shared_.sums);
    if (threadIdx.x == kThreads - 1) shared_.place = before + sums[0] + sums[1] >= needed ? 1 : 0;
    for (uint32_t i = 0; i < 2; ++i) {
      if (before < needed && needed <= before + sums[i]) {
        shared_.key = high - i;
        shared_.above = before;
      }
      before += sums[i];
    }
    __syncthreads();
    const bool found = shared_.place != 0;
    if (found) *above = shared_.above;
    __syncthreads();  // before they are written again
    return found;
  }

  const float* const logits_;
  const int32_t vocab_;
  SharedMemory& shared_;
};

struct Largest {
  int32_t id = 0;  // the smallest one among equals
  float logit = kBanned;
  bool all_finite = true;
};

__device__ Largest FindLargest(const Row& row, SharedMemory& shared) {
  float largest = kBanned;
  int32_t first = INT32_MAX;  // this thread's ids ascend
  float poison = 0;           // NaN once a logit was not finite
  row.ForEach([&](int32_t id, float logit) {
    poison = __fmaf_rn(logit, 0.0f, poison);
    if (logit > largest) {
      largest = logit;
      first = id;
    }
  });
  const uint64_t best =
      BlockMax(uint64_t{KeyOf(largest)} << 32 | static_cast<uint32_t>(INT32_MAX - first), shared);
  return {.id = INT32_MAX - static_cast<int32_t>(best & 0x7fffffff),
          .logit = LogitOf(static_cast<uint32_t>(best >> 32)),
          .all_finite = __syncthreads_or(isnan(poison)) == 0};
}

// REQUIRES: there is one.
__device__ int32_t FirstThatIsNotFinite(const Row& row, SharedMemory& shared) {
  uint64_t from_last = 0;
  row.ForEach([&](int32_t id, float logit) {
    const auto place = static_cast<uint64_t>(INT32_MAX - id);
    if (isnan(logit) || isinf(logit)) from_last = max(from_last, place);
  });
  return INT32_MAX - static_cast<int32_t>(BlockMax(from_last, shared));
}

// Writes to `to` what the record makes of the logits.
__device__ void ChangeLogits(const SamplingRecord& record, const Row& row, float* to) {
  row.ForEach([&](int32_t id, float logit) { to[id] = logit; });
  const TokenChange* changes = record.changes;
  const auto change = [&](int32_t count, const auto& changed) {
    __syncthreads();
    for (int32_t i = threadIdx.x; i < count; i += kThreads) {
      float& logit = to[changes[i].token];
      logit = changed(logit, changes[i].amount);
    }
    changes += count;
  };
  change(record.num_biases, [](float logit, float bias) { return CutOff(logit + bias); });
  change(record.num_penalized, [&](float logit, float occurrences) {
    return Penalized(logit, occurrences, record.penalties);
  });
  change(record.num_banned, [](float, float) { return kBanned; });
  __syncthreads();
}

// Logits of models lie within a few tens of the largest; the rest is one bucket.
__device__ Nearness NearnessForCounts(float max) { return {.max = max, .buckets_per_unit = 64}; }
// What lies further away weighs nothing.
__device__ Nearness NearnessForWeights(float max, float temperature) {
  return {.max = max, .buckets_per_unit = fminf(kBuckets / 28.5f / temperature, FLT_MAX)};
}

// What of the most probable tokens is wanted, and the weight of all.
__device__ void FindLogprobs(const SamplingRecord& record, const Row& row, SharedMemory& shared,
                             FoundToken& found) {
  found.total =
      row.Sum([max = found.max](int32_t, float logit) { return WeightOf(logit, max, 1); });
  if (record.num_top == 0) return;
  uint64_t total = 0;
  const Prefix top = row.ShortestPrefix([](float) -> uint64_t { return 1; },
                                        [&](uint64_t) -> uint64_t { return record.num_top; },
                                        NearnessForCounts(found.max), &total);
  if (threadIdx.x == 0) shared.count = 0;
  __syncthreads();
  row.ForEach([&](int32_t id, float logit) {
    if (!top.Has(id, KeyOf(logit))) return;
    record.top[atomicAdd(&shared.count, 1u)] = {.token = id, .logit = logit};
  });
}

// `max` is the largest of the row's logits, and not banned.
__device__ int32_t DrawToken(const SamplingRecord& record, const Row& row, float max) {
  uint32_t least_key = 0;
  if (record.top_k > 0) {
    const auto count = [](float) -> uint64_t { return 1; };
    const auto needed = [&](uint64_t) -> uint64_t { return record.top_k; };
    least_key = row.FindThreshold(count, needed, NearnessForCounts(max)).key;
  }
  const auto weight_of = [&](float logit) -> uint64_t {
    if (KeyOf(logit) < least_key) return 0;
    const uint64_t weight = WeightOf(logit, max, record.temperature);
    return weight < record.min_weight ? 0 : weight;
  };
  uint64_t total = 0;
  Prefix kept;
  if (record.top_p < 1) {
    const auto needed = [&](uint64_t all) { return NeededWeight(record.top_p, all); };
    kept =
        row.ShortestPrefix(weight_of, needed, NearnessForWeights(max, record.temperature), &total);
  } else {
    total = row.Sum([&](int32_t, float logit) { return weight_of(logit); });
  }
  return row.Locate(
      [&](int32_t id, float logit) { return kept.Has(id, KeyOf(logit)) ? weight_of(logit) : 0; },
      DrawTarget(record.uniform, total));
}

__device__ FoundToken FindToken(const SamplingRecord& record, const SamplingLaunch& p,
                                SharedMemory& shared) {
  const int64_t first = blockIdx.x * p.vocab;
  const auto vocab = static_cast<int32_t>(p.vocab);
  const Row given(p.logits + first, vocab, shared);
  FoundToken found;
  Largest largest = FindLargest(given, shared);
  if (!largest.all_finite) {
    found.bad_token = FirstThatIsNotFinite(given, shared);
    found.bad_logit = given.at(found.bad_token);
    return found;
  }
  found.max = largest.logit;
  const float* logits = p.logits + first;
  if (record.changes_logits()) {
    ChangeLogits(record, given, p.changed + first);
    logits = p.changed + first;
    largest = FindLargest(Row(logits, vocab, shared), shared);
  }
  if (largest.logit == kBanned) return found;
  const Row row(logits, vocab, shared);
  found.token = record.temperature == 0 ? largest.id : DrawToken(record, row, largest.logit);
  found.logit = given.at(found.token);
  if (record.wants_logprob != 0) FindLogprobs(record, given, shared, found);
  return found;
}

__global__ void __launch_bounds__(kThreads) SamplingKernel(const SamplingLaunch p) {
  __shared__ SharedMemory shared;
  // Read at once, for it lies behind the bus.
  constexpr unsigned kWords = sizeof(SamplingRecord) / sizeof(uint64_t);
  static_assert(sizeof(SamplingRecord) % sizeof(uint64_t) == 0);
  __shared__ uint64_t words[kWords];
  if (threadIdx.x < kWords) {
    words[threadIdx.x] = reinterpret_cast<const uint64_t*>(p.records + blockIdx.x)[threadIdx.x];
  }
  __syncthreads();
  const SamplingRecord& record = *reinterpret_cast<const SamplingRecord*>(words);
  if (record.is_valid == 0) return;
  const FoundToken found = FindToken(record, p, shared);
  if (threadIdx.x == 0) p.found[blockIdx.x] = found;
}

__global__ void FeedKernel(const FeedLaunch feed) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= feed.num_tokens || feed.fed_by[i] < 0) return;
  feed.tokens[i] = feed.found[feed.fed_by[i]].token;
}

}  // namespace

cudaError_t LaunchFeed(const FeedLaunch& params, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((params.num_tokens + kThreads - 1) / kThreads);
  FeedKernel<<<blocks, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t LaunchSampling(const SamplingLaunch& params, int64_t rows, cudaStream_t stream) {
  SamplingKernel<<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace kvasir::kernels
