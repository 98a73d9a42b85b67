#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "kernels/dense/philox.h"
#include "kernels/dense/sampling_row.h"

namespace kvasir::kernels {
namespace {

// Marks a banned token in the copy of the logits; the given ones are all finite.
constexpr float kBanned = -std::numeric_limits<float>::infinity();

absl::Status CheckTokens(absl::string_view what, std::span<const int32_t> ids, int64_t vocab) {
  for (int32_t id : ids) {
    if (id >= 0 && id < vocab) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(what, " token ", id, " is not in a vocabulary of ", vocab));
  }
  return absl::OkStatus();
}

bool HasPenalties(const SamplingOptions& options) {
  return options.repetition_penalty != 1 || options.frequency_penalty != 0 ||
         options.presence_penalty != 0;
}

absl::Status CheckAdjustments(const SamplingOptions& options, int64_t vocab) {
  for (const TokenBias& bias : options.biases) {
    KVASIR_RETURN_IF_ERROR(CheckTokens("biased", std::span(&bias.token, 1), vocab));
    if (!std::isfinite(bias.bias)) {
      return absl::InvalidArgumentError(absl::StrCat("the bias of token ", bias.token, " is ",
                                                     bias.bias, ", expected a finite number"));
    }
  }
  if (!(options.repetition_penalty > 0) || !std::isfinite(options.repetition_penalty) ||
      !std::isfinite(options.frequency_penalty) || !std::isfinite(options.presence_penalty)) {
    return absl::InvalidArgumentError(
        absl::StrCat("penalties are repetition ", options.repetition_penalty, ", frequency ",
                     options.frequency_penalty, ", presence ", options.presence_penalty,
                     "; expected finite numbers, repetition above 0"));
  }
  if (!HasPenalties(options)) return absl::OkStatus();
  KVASIR_RETURN_IF_ERROR(CheckTokens("prompt", options.prompt, vocab));
  return CheckTokens("output", options.output, vocab);
}

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
  if (!(options.min_p >= 0 && options.min_p <= 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("min_p is ", options.min_p, ", expected a number in [0, 1]"));
  }
  KVASIR_RETURN_IF_ERROR(CheckAdjustments(options, vocab));
  return CheckTokens("banned", options.banned, vocab);
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

float Finite(float logit) {
  constexpr float kMax = std::numeric_limits<float>::max();
  return std::clamp(logit, -kMax, kMax);
}

// `occurrences` is scratch of [vocab]: -1 for a token that is in neither prompt nor output, else
// how often it is in the output.
void ApplyPenalties(const SamplingOptions& options, std::span<float> logits,
                    std::span<int32_t> occurrences) {
  std::fill(occurrences.begin(), occurrences.end(), -1);
  for (int32_t id : options.prompt) occurrences[static_cast<size_t>(id)] = 0;
  for (int32_t id : options.output) {
    int32_t& count = occurrences[static_cast<size_t>(id)];
    count = std::max(count, 0) + 1;
  }
  for (size_t i = 0; i < logits.size(); ++i) {
    if (occurrences[i] < 0) continue;
    float logit = logits[i];
    logit =
        Finite(logit > 0 ? logit / options.repetition_penalty : logit * options.repetition_penalty);
    if (occurrences[i] > 0) {
      const auto count = static_cast<float>(occurrences[i]);
      logit = Finite(logit - count * options.frequency_penalty);
      logit = Finite(logit - options.presence_penalty);
    }
    logits[i] = logit;
  }
}

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

// The candidates' shares of probability, up to a factor that makes the largest 1, at [id].
void ComputeWeights(std::span<const int32_t> candidates, std::span<const float> logits,
                    float temperature, std::span<float> weights) {
  float max = kBanned;
  for (int32_t id : candidates) max = std::max(max, logits[static_cast<size_t>(id)]);
  for (int32_t id : candidates) {
    const auto i = static_cast<size_t>(id);
    weights[i] = std::exp((logits[i] - max) / temperature);
  }
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

// Drops what weighs less than min_p, the largest weighing 1; the order of ids stays.
std::span<int32_t> KeepMinP(std::span<int32_t> candidates, std::span<const float> weights,
                            float min_p) {
  const auto end = std::remove_if(candidates.begin(), candidates.end(), [&](int32_t id) {
    return weights[static_cast<size_t>(id)] < min_p;
  });
  return candidates.first(static_cast<size_t>(end - candidates.begin()));
}

double TotalWeight(std::span<const int32_t> candidates, std::span<const float> weights) {
  double total = 0;
  for (int32_t id : candidates) total += static_cast<double>(weights[static_cast<size_t>(id)]);
  return total;
}

int32_t Draw(std::span<const int32_t> candidates, std::span<const float> weights, double uniform) {
  const double target = uniform * TotalWeight(candidates, weights);
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
  ComputeWeights(candidates, logits, options.temperature, scratch.weights);
  if (options.min_p > 0) candidates = KeepMinP(candidates, scratch.weights, options.min_p);
  if (options.top_p < 1) {
    const double needed =
        static_cast<double>(options.top_p) * TotalWeight(candidates, scratch.weights);
    candidates = KeepTopP(candidates, logits, scratch.weights, needed);
  }
  return Draw(candidates, scratch.weights,
              UniformAt(options.seed, static_cast<uint64_t>(options.position)));
}

// The logits as sampling sees them: a copy with what the options make of it.
void AdjustLogits(std::span<const float> logits, const SamplingOptions& options,
                  const SamplingScratch& scratch) {
  std::copy(logits.begin(), logits.end(), scratch.logits.begin());
  for (const TokenBias& bias : options.biases) {
    float& logit = scratch.logits[static_cast<size_t>(bias.token)];
    logit = Finite(logit + bias.bias);
  }
  if (HasPenalties(options)) ApplyPenalties(options, scratch.logits, scratch.candidates);
  for (int32_t id : options.banned) scratch.logits[static_cast<size_t>(id)] = kBanned;
}

void WriteTop(std::span<const float> logits, float log_sum_exp, std::span<TokenLogprob> top,
              std::span<int32_t> ids) {
  std::iota(ids.begin(), ids.end(), 0);
  const auto count = static_cast<std::ptrdiff_t>(std::min(top.size(), logits.size()));
  std::partial_sort(ids.begin(), ids.begin() + count, ids.end(), Before{logits});
  for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
    top[i] = {.token = ids[i], .logprob = logits[static_cast<size_t>(ids[i])] - log_sum_exp};
  }
}

}  // namespace

SampledToken SampleRow(std::span<const float> logits, const SamplingOptions& options,
                       const SamplingScratch& scratch) {
  SampledToken result;
  result.status = CheckOptions(options, static_cast<int64_t>(logits.size()));
  if (result.status.ok()) result.status = CheckFinite(logits);
  if (!result.status.ok()) return result;

  AdjustLogits(logits, options, scratch);
  const int32_t greedy = ArgMax(scratch.logits);
  if (scratch.logits[static_cast<size_t>(greedy)] == kBanned) {
    result.status = absl::InvalidArgumentError("every token of the vocabulary is banned");
    return result;
  }
  result.token = options.temperature == 0 ? greedy : DrawToken(options, scratch);
  const float log_sum_exp = LogSumExp(logits);
  result.logprob = logits[static_cast<size_t>(result.token)] - log_sum_exp;
  if (!options.top.empty()) WriteTop(logits, log_sum_exp, options.top, scratch.candidates);
  return result;
}

}  // namespace kvasir::kernels
