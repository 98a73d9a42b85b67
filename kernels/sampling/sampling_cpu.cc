#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <vector>

#include "kernels/sampling/philox.h"
#include "kernels/sampling/sampling_row.h"

namespace kvasir::kernels {
namespace {

// Marks a banned token in the copy of the logits. All given logits are finite.
constexpr float kBanned = -std::numeric_limits<float>::infinity();

bool IsBad(float logit) { return !std::isfinite(logit); }

// Returns the smallest id among the largest logits.
int32_t ArgMax(std::span<const float> logits) {
  return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

uint64_t TotalAtTemperatureOne(std::span<const float> logits, float max) {
  uint64_t total = 0;
  for (float logit : logits) total += WeightOf(logit, max, 1);
  return total;
}

// Larger logit first, then smaller id: a strict order of all tokens.
struct Before {
  std::span<const float> logits;
  bool operator()(int32_t a, int32_t b) const {
    const float x = logits[static_cast<size_t>(a)];
    const float y = logits[static_cast<size_t>(b)];
    return x != y ? x > y : a < b;
  }
};

// `occurrences` is scratch of [vocab].
void ApplyPenalties(const SamplingOptions& options, std::span<float> logits,
                    std::span<int32_t> occurrences) {
  CountOccurrences(options, occurrences);
  const Penalties penalties = PenaltiesOf(options);
  for (size_t i = 0; i < logits.size(); ++i) {
    if (occurrences[i] < 0) continue;
    logits[i] = Penalized(logits[i], static_cast<float>(occurrences[i]), penalties);
  }
}

// Keeps the k largest candidates and all that equal the k-th. Keeps the order of ids.
std::span<int32_t> KeepTopK(std::span<int32_t> candidates, std::span<const float> logits, int64_t k,
                            std::span<float> buffer) {
  if (k <= 0 || k >= static_cast<int64_t>(candidates.size())) return candidates;
  const std::span<float> values = buffer.first(candidates.size());
  std::transform(candidates.begin(), candidates.end(), values.begin(),
                 [&](int32_t id) { return logits[static_cast<size_t>(id)]; });
  const auto kth = values.begin() + (k - 1);
  std::nth_element(values.begin(), kth, values.end(), std::greater<float>());
  const float threshold = *kth;
  const auto end = std::remove_if(candidates.begin(), candidates.end(), [&](int32_t id) {
    return logits[static_cast<size_t>(id)] < threshold;
  });
  return candidates.first(static_cast<size_t>(end - candidates.begin()));
}

// Writes the candidates' weights, at [id].
void ComputeWeights(std::span<const int32_t> candidates, std::span<const float> logits,
                    float temperature, std::span<uint64_t> weights) {
  float max = kBanned;
  for (int32_t id : candidates) max = std::max(max, logits[static_cast<size_t>(id)]);
  for (int32_t id : candidates) {
    const auto i = static_cast<size_t>(id);
    weights[i] = WeightOf(logits[i], max, temperature);
  }
}

// Keeps the shortest prefix in the order of Before that weighs at least `needed`. Restores the
// order of ids. Uses a heap, because the prefix is short when the vocabulary is long.
std::span<int32_t> KeepTopP(std::span<int32_t> candidates, std::span<const float> logits,
                            std::span<const uint64_t> weights, uint64_t needed) {
  const Before before{logits};
  const auto after = [&](int32_t a, int32_t b) { return before(b, a); };
  std::make_heap(candidates.begin(), candidates.end(), after);
  auto kept = candidates.end();  // [kept, end) has left the heap
  uint64_t mass = 0;
  do {
    std::pop_heap(candidates.begin(), kept, after);
    --kept;
    mass += weights[static_cast<size_t>(*kept)];
  } while (mass < needed && kept != candidates.begin());
  std::sort(kept, candidates.end());
  return candidates.last(static_cast<size_t>(candidates.end() - kept));
}

// Drops candidates that weigh less than `least`. Keeps the order of ids.
std::span<int32_t> KeepMinP(std::span<int32_t> candidates, std::span<const uint64_t> weights,
                            uint64_t least) {
  const auto end = std::remove_if(candidates.begin(), candidates.end(), [&](int32_t id) {
    return weights[static_cast<size_t>(id)] < least;
  });
  return candidates.first(static_cast<size_t>(end - candidates.begin()));
}

uint64_t TotalWeight(std::span<const int32_t> candidates, std::span<const uint64_t> weights) {
  uint64_t total = 0;
  for (int32_t id : candidates) total += weights[static_cast<size_t>(id)];
  return total;
}

int32_t Draw(std::span<const int32_t> candidates, std::span<const uint64_t> weights,
             double uniform) {
  const uint64_t target = DrawTarget(uniform, TotalWeight(candidates, weights));
  uint64_t mass = 0;
  const auto drawn = std::find_if(candidates.begin(), candidates.end(), [&](int32_t id) {
    mass += weights[static_cast<size_t>(id)];
    return mass > target;
  });
  return *drawn;  // the total exceeds the target
}

int32_t DrawToken(const SamplingOptions& options, const SamplingScratch& scratch) {
  const std::span<const float> logits = scratch.logits;
  size_t count = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    if (logits[i] != kBanned) scratch.candidates[count++] = static_cast<int32_t>(i);
  }
  std::span<int32_t> candidates =
      KeepTopK(scratch.candidates.first(count), logits, options.top_k, scratch.values);
  ComputeWeights(candidates, logits, options.temperature, scratch.weights);
  candidates = KeepMinP(candidates, scratch.weights, MinWeight(options.min_p));
  if (options.top_p < 1) {
    const uint64_t needed = NeededWeight(options.top_p, TotalWeight(candidates, scratch.weights));
    candidates = KeepTopP(candidates, logits, scratch.weights, needed);
  }
  return Draw(candidates, scratch.weights,
              UniformAt(options.seed, static_cast<uint64_t>(options.position)));
}

// Copies the logits and applies the options' changes.
void AdjustLogits(std::span<const float> logits, const SamplingOptions& options,
                  const SamplingScratch& scratch) {
  std::copy(logits.begin(), logits.end(), scratch.logits.begin());
  for (const TokenBias& bias : options.biases) {
    float& logit = scratch.logits[static_cast<size_t>(bias.token)];
    logit = CutOff(logit + bias.bias);
  }
  if (HasPenalties(options)) ApplyPenalties(options, scratch.logits, scratch.candidates);
  for (int32_t id : options.banned) scratch.logits[static_cast<size_t>(id)] = kBanned;
}

// Writes the first tokens in the order of Before, as many as `top` has room for. `ids` is scratch
// of [vocab].
void FindTop(std::span<const float> logits, std::span<TokenLogit> top, std::span<int32_t> ids) {
  std::iota(ids.begin(), ids.end(), 0);
  std::partial_sort(ids.begin(), ids.begin() + std::ssize(top), ids.end(), Before{logits});
  std::transform(ids.begin(), ids.begin() + std::ssize(top), top.begin(), [&](int32_t id) {
    return TokenLogit{.token = id, .logit = logits[static_cast<size_t>(id)]};
  });
}

FoundToken Find(std::span<const float> logits, const SamplingOptions& options,
                const SamplingScratch& scratch) {
  const auto bad = std::find_if(logits.begin(), logits.end(), IsBad);
  if (bad != logits.end()) {
    return {.bad_token = static_cast<int32_t>(bad - logits.begin()), .bad_logit = *bad};
  }
  FoundToken found;
  found.token = options.given;
  if (options.given < 0) {
    AdjustLogits(logits, options, scratch);
    const int32_t greedy = ArgMax(scratch.logits);
    if (scratch.logits[static_cast<size_t>(greedy)] == kBanned) return {};
    found.token = options.temperature == 0 ? greedy : DrawToken(options, scratch);
  }
  found.logit = logits[static_cast<size_t>(found.token)];
  if (!WantsLogprobs(options)) return found;
  found.max = *std::max_element(logits.begin(), logits.end());
  found.total = TotalAtTemperatureOne(logits, found.max);
  return found;
}

}  // namespace

SampledToken SampleRow(std::span<const float> logits, const SamplingOptions& options,
                       const SamplingScratch& scratch) {
  SampledToken result;
  result.status = CheckOptions(options, static_cast<int64_t>(logits.size()));
  if (!result.status.ok()) return result;
  const FoundToken found = Find(logits, options, scratch);
  std::vector<TokenLogit> top;
  if (found.token >= 0 && !options.top.empty()) {
    top.resize(std::min(options.top.size(), logits.size()));
    FindTop(logits, top, scratch.candidates);
  }
  return FinishRow(found, options, top);
}

}  // namespace kvasir::kernels
