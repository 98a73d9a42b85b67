// Sampled tokens against the distribution that the options define.
#include <algorithm>
#include <cmath>
#include <gtest/gtest.h>
#include <map>
#include <vector>

#include "kernels/sampling/philox.h"
#include "kernels/sampling/sampling.h"
#include "tests/kernels/dense/sampling_case.h"
#include "tests/kernels/dense/sampling_rows.h"

namespace kvasir::kernels {
namespace {

// Returns the distribution that the options define, written from their description alone: in
// double, with sorting and maps. Greedy is a distribution of one token.
std::vector<double> DefinedDistribution(const std::vector<float>& raw,
                                        const SamplingOptions& options) {
  std::vector<double> logits(raw.begin(), raw.end());
  for (const TokenBias& bias : options.biases) {
    logits[static_cast<size_t>(bias.token)] += static_cast<double>(bias.bias);
  }
  std::map<int32_t, int> in_output;
  for (int32_t id : options.output) ++in_output[id];
  std::map<int32_t, int> seen = in_output;
  for (int32_t id : options.prompt) ++seen[id];
  for (const auto& [id, count] : seen) {
    double& logit = logits[static_cast<size_t>(id)];
    const double repetition = static_cast<double>(options.repetition_penalty);
    logit = logit > 0 ? logit / repetition : logit * repetition;
  }
  for (const auto& [id, count] : in_output) {
    logits[static_cast<size_t>(id)] -= count * static_cast<double>(options.frequency_penalty) +
                                       static_cast<double>(options.presence_penalty);
  }
  for (int32_t id : options.banned) logits[static_cast<size_t>(id)] = -HUGE_VAL;

  std::vector<size_t> order(logits.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return logits[a] > logits[b]; });
  std::vector<double> p(logits.size(), 0.0);
  if (options.temperature == 0) {
    p[order[0]] = 1;
    return p;
  }
  const double largest = logits[order[0]];
  const auto weight = [&](size_t i) {
    return std::exp((logits[i] - largest) / static_cast<double>(options.temperature));
  };
  const auto k = static_cast<size_t>(options.top_k);
  double total = 0;
  for (size_t n = 0; n < order.size(); ++n) {
    if (weight(order[n]) < static_cast<double>(options.min_p)) break;
    if (k > 0 && n >= k && logits[order[n]] < logits[order[k - 1]]) break;
    total += p[order[n]] = weight(order[n]);
  }
  double mass = 0;
  for (size_t i : order) {
    if (mass >= static_cast<double>(options.top_p) * total) p[i] = 0;
    mass += p[i];
  }
  return p;
}

// Returns the token that the definition draws, or -1 when the draw is so near a boundary that
// rounding decides.
int32_t DefinedToken(const std::vector<float>& logits, const SamplingOptions& options) {
  const std::vector<double> p = DefinedDistribution(logits, options);
  double total = 0;
  for (double x : p) total += x;
  const double target = UniformAt(options.seed, static_cast<uint64_t>(options.position)) * total;
  double mass = 0;
  for (size_t i = 0; i < p.size(); ++i) {
    mass += p[i];
    if (p[i] > 0 && std::abs(mass - target) < 1e-5 * total && options.temperature > 0) return -1;
    if (mass > target) return static_cast<int32_t>(i);
  }
  return -1;
}

TEST(Sampling, EveryMixOfOptionsDrawsWhatTheirDefinitionDraws) {
  constexpr uint32_t kCases = 4000;
  uint32_t undecided = 0;
  for (uint32_t seed = 0; seed < kCases; ++seed) {
    const RandomSamplingCase c(seed);
    const int32_t expected = DefinedToken(c.logits, c.options);
    if (expected < 0) {
      ++undecided;
      continue;
    }
    const SampledToken token = SampleOne(c.logits, c.options);
    ASSERT_TRUE(token.status.ok()) << token.status;
    ASSERT_EQ(token.token, expected) << "seed " << seed;
  }
  EXPECT_LT(undecided, kCases / 100);
}

}  // namespace
}  // namespace kvasir::kernels
