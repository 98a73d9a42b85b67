#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "kernels/dense/philox.h"
#include "kernels/dense/sampling_row.h"

namespace kvasir::kernels {
namespace {

// Marks a banned token in the copy of the logits; the given ones are all finite.
constexpr float kBanned = -std::numeric_limits<float>::infinity();

absl::Status CheckOptions(const SamplingOptions& options, int64_t vocab) {
  if (!(options.temperature >= 0) || std::isinf(options.temperature)) {
    return absl::InvalidArgumentError(
        absl::StrCat("temperature is ", options.temperature, ", expected a number from 0 on"));
  }
  if (!(options.top_p > 0 && options.top_p <= 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("top_p is ", options.top_p, ", expected a number in (0, 1]"));
  }
  if (options.top_k < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("top_k is ", options.top_k, ", expected a count, or 0 for all tokens"));
  }
  for (int32_t id : options.banned) {
    if (id < 0 || id >= vocab) {
      return absl::InvalidArgumentError(
          absl::StrCat("banned token ", id, " is not in a vocabulary of ", vocab));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckFinite(std::span<const float> logits) {
  for (size_t i = 0; i < logits.size(); ++i) {
    if (!std::isfinite(logits[i])) {
      return absl::DataLossError(
          absl::StrCat("the logit of token ", i, " is ", logits[i],
                       ": the weights or the KV of this sequence are damaged"));
    }
  }
  return absl::OkStatus();
}

// The smallest id among the largest logits.
int32_t ArgMax(std::span<const float> logits) {
  return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

float LogSumExp(std::span<const float> logits) {
  const float max = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (float logit : logits) sum += static_cast<double>(std::exp(logit - max));
  return max + static_cast<float>(std::log(sum));
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

// Keeps the k largest candidates and all that equal the k-th; the order of ids stays.
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

// The candidates' shares of probability, up to a factor, at [id]; returns their sum.
double ComputeWeights(std::span<const int32_t> candidates, std::span<const float> logits,
                      float temperature, std::span<float> weights) {
  float max = kBanned;
  for (int32_t id : candidates) max = std::max(max, logits[static_cast<size_t>(id)]);
  double total = 0;
  for (int32_t id : candidates) {
    const auto i = static_cast<size_t>(id);
    weights[i] = std::exp((logits[i] - max) / temperature);
    total += static_cast<double>(weights[i]);
  }
  return total;
}

// Keeps the shortest prefix in the order of Before that weighs at least p * total. Restores the
// order of ids. A heap, because the prefix is short where the vocabulary is long.
std::span<int32_t> KeepTopP(std::span<int32_t> candidates, std::span<const float> logits,
                            std::span<const float> weights, double needed) {
  const Before before{logits};
  const auto after = [&](int32_t a, int32_t b) { return before(b, a); };
  std::make_heap(candidates.begin(), candidates.end(), after);
  auto kept = candidates.end();  // [kept, end) has left the heap
  double mass = 0;
  do {
    std::pop_heap(candidates.begin(), kept, after);
    --kept;
    mass += static_cast<double>(weights[static_cast<size_t>(*kept)]);
  } while (mass < needed && kept != candidates.begin());
  std::sort(kept, candidates.end());
  return candidates.last(static_cast<size_t>(candidates.end() - kept));
}

int32_t Draw(std::span<const int32_t> candidates, std::span<const float> weights, double uniform) {
  double total = 0;
  for (int32_t id : candidates) total += static_cast<double>(weights[static_cast<size_t>(id)]);
  const double target = uniform * total;
  double mass = 0;
  int32_t last = candidates.front();
  for (int32_t id : candidates) {
    const auto weight = static_cast<double>(weights[static_cast<size_t>(id)]);
    if (weight == 0) continue;
    last = id;
    mass += weight;
    if (mass > target) break;
  }
  // Without a break, rounding made the target equal the total: then it is the last possible token.
  return last;
}

int32_t DrawToken(const SamplingOptions& options, const SamplingScratch& scratch) {
  const std::span<const float> logits = scratch.logits;
  size_t count = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    if (logits[i] != kBanned) scratch.candidates[count++] = static_cast<int32_t>(i);
  }
  std::span<int32_t> candidates =
      KeepTopK(scratch.candidates.first(count), logits, options.top_k, scratch.weights);
  const double total = ComputeWeights(candidates, logits, options.temperature, scratch.weights);
  if (options.top_p < 1) {
    candidates =
        KeepTopP(candidates, logits, scratch.weights, static_cast<double>(options.top_p) * total);
  }
  return Draw(candidates, scratch.weights,
              UniformAt(options.seed, static_cast<uint64_t>(options.position)));
}

}  // namespace

SampledToken SampleRow(std::span<const float> logits, const SamplingOptions& options,
                       const SamplingScratch& scratch) {
  SampledToken result;
  result.status = CheckOptions(options, static_cast<int64_t>(logits.size()));
  if (result.status.ok()) result.status = CheckFinite(logits);
  if (!result.status.ok()) return result;

  std::copy(logits.begin(), logits.end(), scratch.logits.begin());
  for (int32_t id : options.banned) scratch.logits[static_cast<size_t>(id)] = kBanned;
  const int32_t greedy = ArgMax(scratch.logits);
  if (scratch.logits[static_cast<size_t>(greedy)] == kBanned) {
    result.status = absl::InvalidArgumentError("every token of the vocabulary is banned");
    return result;
  }
  result.token = options.temperature == 0 ? greedy : DrawToken(options, scratch);
  result.logprob = logits[static_cast<size_t>(result.token)] - LogSumExp(logits);
  return result;
}

}  // namespace kvasir::kernels
