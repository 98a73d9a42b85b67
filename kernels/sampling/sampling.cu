// Sampling on the GPU, with a cluster of CTAs a row, fewer when there are many rows
// (sampling_row.cuh). Compiled without fused multiply-add, as sampling_weights.h requires.
#include <cfloat>

#include "kernels/base/overlapped_launch.h"
#include "kernels/plans/plan_log.h"
#include "kernels/sampling/sampling_launch.h"
#include "kernels/sampling/sampling_plan.h"
#include "kernels/sampling/sampling_row.cuh"

namespace kvasir::kernels {
namespace {

constexpr float kBanned = -INFINITY;

// Returns the largest value to all threads of the CTA, which all call it.
__device__ uint64_t BlockMax(uint64_t value, RowMemory& memory) {
  value = GreatestOfLanes(value);
  __syncthreads();
  if (threadIdx.x % kWarpThreads == 0) memory.sums[threadIdx.x / kWarpThreads] = value;
  __syncthreads();
  return GreatestOfLanes(memory.sums[threadIdx.x % kWarpThreads]);
}

// References shared by all threads of a row's CTAs.
struct Context {
  const SamplingRecord& record;
  RowMemory& memory;
  RowBlocks& blocks;
};

struct Largest {
  int32_t id = 0;  // the smallest one among equals
  float logit = kBanned;
  bool all_finite = true;
};

// Returns the largest logit of the CTA's slice: its place in the low half, its key in the high one.
// Returns kNotFinite if a logit is not finite, which is not tested when some are banned.
constexpr uint64_t kNotFinite = ~uint64_t{0};  // above the value of any logit
template <bool kMayBeBanned>
__device__ uint64_t LargestOfBlock(const Row& row, RowMemory& memory) {
  float largest = kBanned;
  int32_t first = INT32_MAX;  // this thread's ids ascend
  float poison = 0;           // NaN once a logit was not finite
  row.ForEach<2>([&](int32_t id, float logit) {
    if constexpr (!kMayBeBanned) poison = __fmaf_rn(logit, 0.0f, poison);
    if (logit > largest) {
      largest = logit;
      first = id;
    }
  });
  const uint64_t own = uint64_t{KeyOf(largest)} << 32 | static_cast<uint32_t>(INT32_MAX - first);
  return BlockMax(isnan(poison) ? kNotFinite : own, memory);
}

// Makes a Largest from the greatest of all CTAs' values.
__device__ Largest LargestOf(uint64_t best) {
  return {.id = INT32_MAX - static_cast<int32_t>(best & 0x7fffffff),
          .logit = LogitOf(static_cast<uint32_t>(best >> 32)),
          .all_finite = best != kNotFinite};
}

// Returns the first token with a logit that is not finite. REQUIRES: there is one.
__device__ int32_t FirstThatIsNotFinite(const Row& row, RowMemory& memory, RowBlocks& blocks) {
  uint64_t from_last = 0;
  row.ForEach([&](int32_t id, float logit) {
    const auto place = static_cast<uint64_t>(INT32_MAX - id);
    if (isnan(logit) || isinf(logit)) from_last = max(from_last, place);
  });
  return INT32_MAX - static_cast<int32_t>(blocks.Greatest(BlockMax(from_last, memory)));
}

// Writes the logits with the record's changes to `to` [vocab]. Any CTA may make a change.
__device__ void ChangeLogits(const Context& c, const Row& row, float* to) {
  row.ForEach([&](int32_t id, float logit) { to[id] = logit; });
  const TokenChange* changes = c.record.changes;
  const auto change = [&](int32_t count, const auto& changed) {
    if (count == 0) return;
    hopper::ClusterSync();  // earlier changes are made
    const auto stride = static_cast<int32_t>(c.blocks.count() * kSamplingThreads);
    for (auto i = static_cast<int32_t>(c.blocks.rank() * kSamplingThreads + threadIdx.x); i < count;
         i += stride) {
      float& logit = to[changes[i].token];
      logit = changed(logit, changes[i].amount);
    }
    changes += count;
  };
  change(c.record.num_biases, [](float logit, float bias) { return CutOff(logit + bias); });
  change(c.record.num_penalized, [&](float logit, float occurrences) {
    return Penalized(logit, occurrences, c.record.penalties);
  });
  change(c.record.num_banned, [](float, float) { return kBanned; });
  hopper::ClusterSync();
}

// Logits of models lie within a few tens of the largest. All others share one bucket.
__device__ Nearness NearnessForCounts(float max) { return {.max = max, .buckets_per_unit = 64}; }
// Logits further away weigh nothing.
__device__ Nearness NearnessForWeights(float max, float temperature) {
  return {.max = max, .buckets_per_unit = fminf(kBuckets / 28.5f / temperature, FLT_MAX)};
}

// Finds the weight of all tokens, and the wanted number of most probable ones.
__device__ void FindLogprobs(const Context& c, const Row& row, FoundToken& found) {
  found.total =
      row.Sum([max = found.max](int32_t, float logit) { return WeightOf(logit, max, 1); });
  if (c.record.num_top == 0) return;
  const Prefix top = row.ShortestPrefix([](float) -> uint64_t { return 1; },
                                        [&](uint64_t) -> uint64_t { return c.record.num_top; },
                                        NearnessForCounts(found.max));
  hopper::ClusterSync();  // counts of lists have been read
  if (threadIdx.x == 0) c.memory.count = 0;
  hopper::ClusterSync();
  uint32_t* const count = hopper::OfBlock(&c.memory.count, 0);
  row.ForEach([&](int32_t id, float logit) {
    if (!top.Has(id, KeyOf(logit))) return;
    c.record.top[atomicAdd(count, 1u)] = {.token = id, .logit = logit};
  });
  hopper::ClusterSync();  // before the first CTA's memory is gone
}

// Returns the drawn token in one CTA and -1 in the others. `max` is the largest of the row's
// logits, and is not banned.
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
  Prefix kept;
  if (record.top_p < 1) {
    const auto needed = [&](uint64_t all) { return NeededWeight(record.top_p, all); };
    kept = row.ShortestPrefix(weight_of, needed, NearnessForWeights(max, record.temperature));
  }
  return row.LocateHere(
      [&](int32_t id, float logit) -> uint64_t {
        return kept.Has(id, KeyOf(logit)) ? weight_of(logit) : 0;
      },
      [&](uint64_t total) { return DrawTarget(record.uniform, total); });
}

// Finds a row's token; one CTA writes the result. `given` has the logits as given, and `largest` is
// their largest.
__device__ void FindToken(const Context& c, const SamplingLaunch& p, int64_t row_number,
                          const Row& given, Largest largest) {
  const float* logits = p.logits + row_number * p.vocab;
  FoundToken found;
  bool is_here = c.blocks.rank() == 0;  // this CTA has found the result
  if (!largest.all_finite) {
    found.bad_token = FirstThatIsNotFinite(given, c.memory, c.blocks);
    found.bad_logit = logits[found.bad_token];
  } else {
    found.max = largest.logit;
    const auto vocab = static_cast<int32_t>(p.vocab);
    const float* asked = logits;
    if (c.record.changes_logits()) {
      float* const changed = p.changed + row_number * p.vocab;
      ChangeLogits(c, given, changed);
      asked = changed;
      const Row row(changed, vocab, c.memory, c.blocks);
      largest = LargestOf(c.blocks.Greatest(LargestOfBlock<true>(row, c.memory)));
    }
    if (largest.logit != kBanned) {
      found.token = c.record.given >= 0 ? c.record.given : largest.id;
      if (c.record.temperature != 0) {
        const Row row(asked, vocab, c.memory, c.blocks);
        found.token = DrawToken(c.record, row, largest.logit);
        is_here = found.token >= 0;
      }
      if (is_here) found.logit = logits[found.token];
      if (c.record.wants_logprob != 0) FindLogprobs(c, given, found);
    }
  }
  if (is_here && threadIdx.x == 0) p.found[row_number] = found;
}

__global__ void __launch_bounds__(kSamplingThreads) SamplingKernel(const SamplingLaunch p) {
  __shared__ RowMemory memory;
  RowBlocks blocks(memory);
  const int64_t row_number = blockIdx.x / blocks.count();
  cudaTriggerProgrammaticLaunchCompletion();
  // Read first, because it lies across the bus, and no kernel writes it. The kernel ahead ends and
  // the largest logit is found meanwhile.
  constexpr unsigned kWords = sizeof(SamplingRecord) / sizeof(uint64_t);
  static_assert(sizeof(SamplingRecord) % sizeof(uint64_t) == 0);
  __shared__ uint64_t words[kWords];
  const auto* const record_words = reinterpret_cast<const uint64_t*>(p.records + row_number);
  const uint64_t word = threadIdx.x < kWords ? record_words[threadIdx.x] : 0;
  const Row given(p.logits + row_number * p.vocab, static_cast<int32_t>(p.vocab), memory, blocks);
  blocks.Begin();
  cudaGridDependencySynchronize();
  const uint64_t own_largest = LargestOfBlock<false>(given, memory);
  blocks.AwaitBegin();
  const Largest largest = LargestOf(blocks.Greatest(own_largest));
  if (threadIdx.x < kWords) words[threadIdx.x] = word;
  __syncthreads();
  const SamplingRecord& record = *reinterpret_cast<const SamplingRecord*>(words);
  if (record.is_valid == 0) return;
  FindToken({.record = record, .memory = memory, .blocks = blocks}, p, row_number, given, largest);
}

// Returns the most CTAs of a row. The device may have no room for the largest cluster that it
// allows.
unsigned MostRowBlocks() {
  if (cudaFuncSetAttribute(SamplingKernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) !=
      cudaSuccess) {
    return kPortableRowBlocks;
  }
  cudaLaunchAttribute attribute = {.id = cudaLaunchAttributeClusterDimension};
  attribute.val.clusterDim = {.x = kMaxRowBlocks, .y = 1, .z = 1};
  const cudaLaunchConfig_t config = {
      .gridDim = kMaxRowBlocks, .blockDim = kSamplingThreads, .attrs = &attribute, .numAttrs = 1};
  int clusters = 0;
  const cudaError_t error = cudaOccupancyMaxActiveClusters(&clusters, SamplingKernel, &config);
  return error == cudaSuccess && clusters > 0 ? kMaxRowBlocks : kPortableRowBlocks;
}

__global__ void FeedKernel(const FeedLaunch feed) {
  const int64_t i = int64_t{blockIdx.x} * kSamplingThreads + threadIdx.x;
  if (i >= feed.num_tokens || feed.fed_by[i] < 0) return;
  feed.tokens[i] = feed.found[feed.fed_by[i]].token;
}

}  // namespace

cudaError_t LaunchFeed(const FeedLaunch& params, cudaStream_t stream) {
  const auto blocks =
      static_cast<unsigned>((params.num_tokens + kSamplingThreads - 1) / kSamplingThreads);
  FeedKernel<<<blocks, kSamplingThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t LaunchSampling(const SamplingLaunch& params, int64_t rows, cudaStream_t stream) {
  static const unsigned most_blocks = MostRowBlocks();
  const SamplingPlan plan = PlanSampling(rows, most_blocks);
  TellPlan("sampling", plan);
  return LaunchOverlappedClusters(SamplingKernel, plan.ctas_of_row,
                                  static_cast<unsigned>(rows) * plan.ctas_of_row, kSamplingThreads,
                                  0, stream, params);
}

}  // namespace kvasir::kernels
