// Sampling on the GPU, a block of threads a row. Everything is made of a few questions to all
// logits of the row at once: their largest, a sum, the place in a running sum, the threshold above
// which enough of a sum lies. Sums are of integers, so they are the CPU's whatever their order.
// Compiled without fused multiply-add, as sampling_weights.h wants it.
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

struct SharedMemory {
  uint64_t sums[kWarps];
  uint64_t buckets[kBuckets];
  // What one thread tells the others.
  uint64_t above;
  uint32_t key;
  int32_t place;
  uint32_t count;
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

// The logits of one row, asked by all threads of the block together. A measure is a function
// uint64_t(int32_t id, float logit).
class Row {
 public:
  __device__ Row(const float* logits, int32_t vocab, SharedMemory& shared)
      : logits_(logits), vocab_(vocab), shared_(shared) {}

  __device__ float at(int32_t id) const { return logits_[id]; }

  // Calls see(id, logit) for all tokens, each by one thread.
  template <typename See>
  __device__ void ForEach(const See& see) const {
    if (reinterpret_cast<uintptr_t>(logits_) % sizeof(float4) != 0) {
      for (int32_t id = threadIdx.x; id < vocab_; id += kThreads) see(id, logits_[id]);
      return;
    }
    const int32_t runs = vocab_ / 4;
    const auto* const run = reinterpret_cast<const float4*>(logits_);
#pragma unroll 4
    for (int32_t i = threadIdx.x; i < runs; i += kThreads) {
      const float4 values = run[i];
      see(4 * i, values.x);
      see(4 * i + 1, values.y);
      see(4 * i + 2, values.z);
      see(4 * i + 3, values.w);
    }
    const int32_t id = 4 * runs + static_cast<int32_t>(threadIdx.x);
    if (id < vocab_) see(id, logits_[id]);
  }

  template <typename Measure>
  __device__ uint64_t Sum(const Measure& measure) const {
    uint64_t sum = 0;
    ForEach([&](int32_t id, float logit) { sum += measure(id, logit); });
    return BlockTotal(sum);
  }

  // The first token that makes the sum over it and those before it exceed `target`. REQUIRES: the
  // sum over all does.
  template <typename Measure>
  __device__ int32_t Locate(const Measure& measure, uint64_t target) const {
    // By warps first, each over a range of its own; then, by all of them, in the range.
    const int32_t range = (vocab_ + kWarps - 1) / kWarps;
    const int32_t warp = threadIdx.x / kWarpThreads;
    const int32_t end = min(vocab_, (warp + 1) * range);
    uint64_t sum = 0;
    for (int32_t id = warp * range + threadIdx.x % kWarpThreads; id < end; id += kWarpThreads) {
      sum += measure(id, logits_[id]);
    }
    BlockTotal(sum);
    int32_t chosen = 0;
    while (chosen < kWarps - 1 && shared_.sums[chosen] <= target) target -= shared_.sums[chosen++];
    __syncthreads();
    if (threadIdx.x == 0) shared_.place = -1;
    const int32_t last = min(vocab_, (chosen + 1) * range);
    for (int32_t first = chosen * range; first < last; first += kThreads) {
      const int32_t id = first + static_cast<int32_t>(threadIdx.x);
      const uint64_t own = id < last ? measure(id, logits_[id]) : 0;
      const uint64_t before = SumBefore(own, shared_.sums);
      if (before <= target && target < before + own) shared_.place = id;
      __syncthreads();
      if (shared_.place >= 0) break;
      for (int i = 0; i < kWarps; ++i) target -= shared_.sums[i];
    }
    return shared_.place;
  }

  // The largest key such that tokens with keys from it on measure `needed` > 0 at least, and what
  // those above it measure; 0 if all together do not.
  template <typename Measure>
  __device__ uint32_t Threshold(const Measure& measure, uint64_t needed, uint64_t* above) const {
    uint32_t key = 0;
    *above = 0;
    for (int digit = kDigits - 1; digit >= 0; --digit) {
      const int shift = digit * kDigitBits;
      shared_.buckets[threadIdx.x] = shared_.buckets[threadIdx.x + kThreads] = 0;
      __syncthreads();
      ForEach([&](int32_t id, float logit) {
        const uint32_t other = KeyOf(logit);
        if (uint64_t{other} >> (shift + kDigitBits) != uint64_t{key} >> (shift + kDigitBits)) {
          return;
        }
        const uint64_t amount = measure(id, logit);
        if (amount == 0) return;
        atomicAdd(reinterpret_cast<unsigned long long*>(
                      &shared_.buckets[other >> shift & (kBuckets - 1)]),
                  static_cast<unsigned long long>(amount));
      });
      if (!ChooseBucket(needed, above)) return 0;
      key |= shared_.key << shift;
    }
    return key;
  }

  // The shortest prefix that measures `needed` > 0 at least. Of tokens with the same logit all or
  // none measure anything, `amount` gives how much.
  template <typename Measure, typename Amount>
  __device__ Prefix ShortestPrefix(const Measure& measure, const Amount& amount, uint64_t needed,
                                   uint64_t* total) const {
    uint64_t above = 0;
    Prefix prefix = {.key = Threshold(measure, needed, &above)};
    const uint64_t each = amount(LogitOf(prefix.key));
    const uint64_t equals = (needed - above + each - 1) / each;
    prefix.last_id =
        Locate([&](int32_t, float logit) -> uint64_t { return KeyOf(logit) == prefix.key ? 1 : 0; },
               equals - 1);
    *total = above + equals * each;
    return prefix;
  }

 private:
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
    __syncthreads();
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

// The smallest id among the largest logits, and the first one that is not finite.
struct Extremes {
  int32_t largest;
  int32_t bad;  // -1: there is none
};

__device__ Extremes FindExtremes(const Row& row, SharedMemory& shared) {
  // Of the key and of how far the id is from the last one.
  uint64_t best = 0, first_bad = 0;
  row.ForEach([&](int32_t id, float logit) {
    const auto from_last = static_cast<uint32_t>(INT32_MAX - id);
    if (isnan(logit) || isinf(logit)) first_bad = max(first_bad, uint64_t{from_last});
    best = max(best, uint64_t{KeyOf(logit)} << 32 | from_last);
  });
  best = BlockMax(best, shared);
  first_bad = BlockMax(first_bad, shared);
  const auto id_of = [](uint64_t from_last) {
    return INT32_MAX - static_cast<int32_t>(from_last & 0x7fffffff);
  };
  return {.largest = id_of(best), .bad = first_bad == 0 ? -1 : id_of(first_bad)};
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

// What of the most probable tokens is wanted, and the weight of all.
__device__ void FindLogprobs(const SamplingRecord& record, const Row& row, SharedMemory& shared,
                             FoundToken& found) {
  found.total =
      row.Sum([max = found.max](int32_t, float logit) { return WeightOf(logit, max, 1); });
  if (record.num_top == 0) return;
  uint64_t total = 0;
  const Prefix top = row.ShortestPrefix([](int32_t, float) -> uint64_t { return 1; },
                                        [](float) -> uint64_t { return 1; },
                                        static_cast<uint64_t>(record.num_top), &total);
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
    uint64_t above = 0;
    least_key = row.Threshold([](int32_t, float) -> uint64_t { return 1; },
                              static_cast<uint64_t>(record.top_k), &above);
  }
  const auto weight_of = [&](float logit) -> uint64_t {
    if (KeyOf(logit) < least_key) return 0;
    const uint64_t weight = WeightOf(logit, max, record.temperature);
    return weight < record.min_weight ? 0 : weight;
  };
  const auto weight = [&](int32_t, float logit) { return weight_of(logit); };
  uint64_t total = row.Sum(weight);
  Prefix kept;
  if (record.top_p < 1) {
    kept = row.ShortestPrefix(weight, weight_of, NeededWeight(record.top_p, total), &total);
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
  const Extremes extremes = FindExtremes(given, shared);
  if (extremes.bad >= 0) {
    found.bad_token = extremes.bad;
    found.bad_logit = given.at(extremes.bad);
    return found;
  }
  found.max = given.at(extremes.largest);
  int32_t largest = extremes.largest;
  const float* logits = p.logits + first;
  if (record.changes_logits()) {
    ChangeLogits(record, given, p.changed + first);
    logits = p.changed + first;
    largest = FindExtremes(Row(logits, vocab, shared), shared).largest;
  }
  const Row row(logits, vocab, shared);
  if (row.at(largest) == kBanned) return found;
  found.token = record.temperature == 0 ? largest : DrawToken(record, row, row.at(largest));
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

}  // namespace

cudaError_t LaunchSampling(const SamplingLaunch& params, int64_t rows, cudaStream_t stream) {
  SamplingKernel<<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace kvasir::kernels
