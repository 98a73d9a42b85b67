#include "kernels/sampling/sampling.h"

#include <cmath>
#include <gtest/gtest.h>
#include <limits>
#include <map>
#include <random>
#include <span>
#include <vector>

#include "kernels/base/buffer.h"
#include "kernels/sampling/sampling_weights.h"
#include "tests/kernels/dense/sampling_rows.h"
#include "tests/support/thread_executor.h"

namespace kvasir::kernels {
namespace {

using tests::ThreadExecutor;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Counts how often each token is sampled over `n` positions.
std::map<int32_t, int> Histogram(const std::vector<float>& logits, SamplingOptions options, int n) {
  SerialExecutor executor;
  std::map<int32_t, int> counts;
  for (options.position = 0; options.position < n; ++options.position) {
    ++counts[SampleOne(logits, options).token];
  }
  return counts;
}

std::vector<int32_t> Support(const std::vector<float>& logits, const SamplingOptions& options) {
  std::vector<int32_t> ids;
  for (const auto& [id, count] : Histogram(logits, options, 3000)) ids.push_back(id);
  return ids;
}

std::vector<float> LogOf(const std::vector<double>& probabilities) {
  std::vector<float> logits;
  for (double p : probabilities) logits.push_back(static_cast<float>(std::log(p)));
  return logits;
}

using Ids = std::vector<int32_t>;

TEST(Sampling, GreedyTakesTheLargestAndTheSmallerIdAmongEquals) {
  EXPECT_EQ(SampleOne({1, 3, 2}, {}).token, 1);
  EXPECT_EQ(SampleOne({1, 3, 3, 3}, {}).token, 1);
  EXPECT_EQ(SampleOne({-5, -5}, {}).token, 0);
  EXPECT_EQ(SampleOne({7}, {}).token, 0);
}

TEST(Sampling, BannedTokensNeverComeOut) {
  const Ids banned = {1, 3};
  EXPECT_EQ(SampleOne({1, 3, 2, 9}, {.banned = banned}).token, 2);
  EXPECT_EQ(Support({1, 3, 2, 9}, {.temperature = 5, .banned = banned}), (Ids{0, 2}));
}

TEST(Sampling, DrawsWithTheProbabilitiesOfTheSoftmaxAtTheTemperature) {
  const std::vector<double> p = {0.5, 0.1, 0.15, 0.25};
  constexpr int kDraws = 40000;
  for (float temperature : {1.0f, 0.5f, 3.0f}) {
    double total = 0;
    for (double x : p) total += std::pow(x, 1 / static_cast<double>(temperature));
    auto counts = Histogram(LogOf(p), {.temperature = temperature, .seed = 7}, kDraws);
    double chi_squared = 0;
    for (size_t i = 0; i < p.size(); ++i) {
      const double expected = kDraws * std::pow(p[i], 1 / static_cast<double>(temperature)) / total;
      chi_squared += std::pow(counts[static_cast<int32_t>(i)] - expected, 2) / expected;
    }
    EXPECT_LT(chi_squared, 16.27) << "1 in 1000 at 3 degrees of freedom";
  }
}

TEST(Sampling, TopKKeepsTheKLargestAndTheirEquals) {
  const std::vector<float> logits = {1, 4, 2, 3, 2};
  EXPECT_EQ(Support(logits, {.temperature = 4, .top_k = 1}), (Ids{1}));
  EXPECT_EQ(Support(logits, {.temperature = 4, .top_k = 2}), (Ids{1, 3}));
  EXPECT_EQ(Support(logits, {.temperature = 4, .top_k = 3}), (Ids{1, 2, 3, 4}));
  EXPECT_EQ(Support(logits, {.temperature = 4, .top_k = 5}), (Ids{0, 1, 2, 3, 4}));
  EXPECT_EQ(Support(logits, {.temperature = 4, .top_k = 1000}), (Ids{0, 1, 2, 3, 4}));
}

TEST(Sampling, TopPKeepsTheShortestPrefixThatReachesP) {
  const std::vector<float> logits = LogOf({0.15, 0.5, 0.05, 0.3});
  EXPECT_EQ(Support(logits, {.temperature = 1, .top_p = 0.01f}), (Ids{1}));
  EXPECT_EQ(Support(logits, {.temperature = 1, .top_p = 0.49f}), (Ids{1}));
  EXPECT_EQ(Support(logits, {.temperature = 1, .top_p = 0.51f}), (Ids{1, 3}));
  EXPECT_EQ(Support(logits, {.temperature = 1, .top_p = 0.81f}), (Ids{0, 1, 3}));
  EXPECT_EQ(Support(logits, {.temperature = 1, .top_p = 1.0f}), (Ids{0, 1, 2, 3}));
  // Equal tokens are taken in order of id.
  EXPECT_EQ(Support({2, 2, 2, 2}, {.temperature = 1, .top_p = 0.6f}), (Ids{0, 1, 2}));
  // "At least p": exactly p is enough.
  EXPECT_EQ(Support({2, 2, 2, 2}, {.temperature = 1, .top_p = 0.5f}), (Ids{0, 1}));
}

// At temperature 0.5 the shares are those of p squared. With top-k 2 they are those of the two
// largest.
TEST(Sampling, TopPComesAfterTemperatureAndTopK) {
  const std::vector<float> logits = LogOf({0.4, 0.3, 0.2, 0.1});
  EXPECT_EQ(Support(logits, {.temperature = 1, .top_p = 0.5f}), (Ids{0, 1}));
  EXPECT_EQ(Support(logits, {.temperature = 0.5f, .top_p = 0.5f}), (Ids{0}));
  EXPECT_EQ(Support(logits, {.temperature = 1, .top_k = 2, .top_p = 0.55f}), (Ids{0}));
}

TEST(Sampling, RepetitionCountsATokenOnceAndPushesItDownWhateverItsSign) {
  const Ids seen = {0, 0, 0};
  const float half = 2.0f;
  // 4 / 2 = 2, which is below 3; -1 * 2 = -2, which is below -1.5; 0 stays.
  EXPECT_EQ(SampleOne({4, 3}, {.repetition_penalty = half, .prompt = seen}).token, 1);
  EXPECT_EQ(SampleOne({4, 3}, {.repetition_penalty = half, .output = seen}).token, 1);
  EXPECT_EQ(
      SampleOne({4, 1.9f}, {.repetition_penalty = half, .prompt = seen, .output = seen}).token, 0);
  EXPECT_EQ(SampleOne({-1, -1.5f}, {.repetition_penalty = half, .prompt = seen}).token, 1);
  EXPECT_EQ(SampleOne({0, -0.001f}, {.repetition_penalty = half, .prompt = seen}).token, 0);
  EXPECT_EQ(SampleOne({1, 3}, {.repetition_penalty = 0.25f, .output = seen}).token, 0);
}

TEST(Sampling, FrequencyCountsEveryOccurrenceInTheOutputAndPresenceTheFirst) {
  const Ids thrice = {0, 0, 0};
  EXPECT_EQ(SampleOne({4, 3}, {.frequency_penalty = 0.33f, .output = thrice}).token, 0);
  EXPECT_EQ(SampleOne({4, 3}, {.frequency_penalty = 0.34f, .output = thrice}).token, 1);
  EXPECT_EQ(SampleOne({4, 3}, {.presence_penalty = 0.99f, .output = thrice}).token, 0);
  EXPECT_EQ(SampleOne({4, 3}, {.presence_penalty = 1.01f, .output = thrice}).token, 1);
  // These two penalties do not count the prompt.
  EXPECT_EQ(
      SampleOne({4, 3}, {.frequency_penalty = 2, .presence_penalty = 2, .prompt = thrice}).token,
      0);
  // Negative penalties ask for repetition.
  EXPECT_EQ(SampleOne({2, 3}, {.frequency_penalty = -0.4f, .output = thrice}).token, 0);
}

TEST(Sampling, BiasesComeBeforePenaltiesAndBansBehindBoth) {
  const Ids seen = {0}, banned = {1};
  const std::vector<TokenBias> up = {{.token = 0, .bias = 6}};
  // (1 + 6) / 2 = 3.5. With the bias added after the penalty it would be 6.5.
  EXPECT_EQ(SampleOne({1, 4}, {.biases = up, .repetition_penalty = 2, .output = seen}).token, 1);
  const std::vector<TokenBias> huge = {{.token = 1, .bias = 100}};
  EXPECT_EQ(SampleOne({1, 4}, {.banned = banned, .biases = huge}).token, 0);
}

TEST(Sampling, AdjustedLogitsStayFiniteSoNothingIsBannedByOverflow) {
  constexpr float kHuge = std::numeric_limits<float>::max();
  const Ids all = {0, 1};
  const std::vector<TokenBias> down = {{.token = 0, .bias = -kHuge}, {.token = 1, .bias = -kHuge}};
  EXPECT_EQ(SampleOne({-kHuge, -kHuge}, {.biases = down}).token, 0);
  EXPECT_EQ(SampleOne({-kHuge, -1}, {.repetition_penalty = kHuge, .output = all}).token, 0);
  EXPECT_EQ(SampleOne({1e30f, kHuge}, {.repetition_penalty = 1e-30f, .output = all}).token, 0);
  const Ids often(100000, 1);
  EXPECT_EQ(SampleOne({0, 1}, {.frequency_penalty = kHuge, .output = often}).token, 0);
  EXPECT_EQ(SampleOne({0, 1}, {.frequency_penalty = -kHuge, .output = often}).token, 1);
}

TEST(Sampling, MinPDropsWhatIsLessProbableThanItsShareOfTheLargest) {
  const std::vector<float> logits = LogOf({0.15, 0.5, 0.05, 0.3});
  EXPECT_EQ(Support(logits, {.temperature = 1, .min_p = 0.2f}), (Ids{0, 1, 3}));
  EXPECT_EQ(Support(logits, {.temperature = 1, .min_p = 0.31f}), (Ids{1, 3}));
  EXPECT_EQ(Support(logits, {.temperature = 1, .min_p = 1}), (Ids{1}));
  EXPECT_EQ(Support({2, 2, 1}, {.temperature = 1, .min_p = 1}), (Ids{0, 1}));
  // After the temperature: at 0.5 the shares are squared.
  EXPECT_EQ(Support(logits, {.temperature = 0.5f, .min_p = 0.2f}), (Ids{1, 3}));
  // top-p counts the tokens that min-p left: 0.5 of 0.8 is less than 0.7 of it.
  EXPECT_EQ(Support(logits, {.temperature = 1, .top_p = 0.6f, .min_p = 0.31f}), (Ids{1}));
}

TEST(Sampling, TopLogprobsAreTheModelsWhateverIsDoneToTheLogits) {
  const std::vector<float> logits = LogOf({0.15, 0.5, 0.05, 0.3});
  const Ids banned = {1}, seen = {1, 3};
  const std::vector<TokenBias> bias = {{.token = 2, .bias = 9}};
  std::vector<TokenLogprob> top(3);
  const SampledToken token = SampleOne(logits, {.temperature = 0.01f,
                                                .banned = banned,
                                                .biases = bias,
                                                .repetition_penalty = 2,
                                                .presence_penalty = 2,
                                                .output = seen,
                                                .top = top});
  EXPECT_EQ(token.token, 2);
  EXPECT_NEAR(token.logprob, std::log(0.05), 1e-6);
  const double expected[] = {0.5, 0.3, 0.15};
  const int32_t ids[] = {1, 3, 0};
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(top[i].token, ids[i]);
    EXPECT_NEAR(top[i].logprob, std::log(expected[i]), 1e-6);
  }
}

TEST(Sampling, TopLogprobsOfEqualsAreInOrderOfIdAndNoMoreThanTheVocabulary) {
  std::vector<TokenLogprob> top(5);
  SampleOne({1, 2, 2}, {.top = top});
  EXPECT_EQ(top[0].token, 1);
  EXPECT_EQ(top[1].token, 2);
  EXPECT_EQ(top[2].token, 0);
  EXPECT_EQ(top[3].token, -1);
  constexpr float kHuge = std::numeric_limits<float>::max();
  SampleOne({-kHuge, kHuge, 0}, {.top = top});
  EXPECT_EQ(top[0].token, 1);
  EXPECT_EQ(top[0].logprob, 0);
}

TEST(Sampling, SameSeedAndPositionGiveTheSameTokenWhateverTheBatchAndThreads) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<std::vector<float>> rows(40, std::vector<float>(1000));
  const Ids seen = {7, 7, 999, 0, 512};
  std::vector<SamplingOptions> options;
  for (auto& row : rows) {
    for (float& logit : row) logit = normal(random);
    options.push_back({.temperature = 1.5f,
                       .top_k = options.size() % 2 == 0 ? 0 : 50,
                       .top_p = options.size() % 3 == 0 ? 1.0f : 0.9f,
                       .seed = 0xfedcba9876543210u + options.size() % 5,
                       .position = static_cast<int64_t>(options.size()) % 7,
                       .min_p = options.size() % 4 == 0 ? 0.01f : 0.0f,
                       .repetition_penalty = options.size() % 5 == 0 ? 1.3f : 1.0f,
                       .presence_penalty = options.size() % 7 == 0 ? 0.5f : 0.0f,
                       .prompt = seen,
                       .output = seen});
  }
  ThreadExecutor threads(3);
  const std::vector<SampledToken> batch = SampleRows(rows, options, threads);
  for (size_t r = 0; r < rows.size(); ++r) {
    const SampledToken alone = SampleOne(rows[r], options[r]);
    EXPECT_EQ(batch[r].token, alone.token) << r;
    EXPECT_EQ(batch[r].logprob, alone.logprob) << r;
  }
  SamplingOptions other = options[0];
  other.seed += 1;
  EXPECT_NE(SampleOne(rows[0], other).token, batch[0].token);
}

TEST(Sampling, LogprobIsThatOfTheModelBeforeAllFilters) {
  const std::vector<float> logits = LogOf({0.15, 0.5, 0.05, 0.3});
  const Ids banned = {1};
  EXPECT_NEAR(SampleOne(logits, {}).logprob, std::log(0.5), 1e-6);
  const SampledToken token =
      SampleOne(logits, {.temperature = 0.01f, .top_k = 1, .banned = banned});
  EXPECT_EQ(token.token, 3);
  EXPECT_NEAR(token.logprob, std::log(0.3), 1e-6);
  EXPECT_NEAR(SampleOne({1000, 999}, {}).logprob, -std::log1p(std::exp(-1.0)), 1e-4);
}

TEST(Sampling, AGivenTokenIsTakenWhateverItsLogitAndTheOptions) {
  const std::vector<float> logits = LogOf({0.15, 0.5, 0.05, 0.3});
  const Ids banned = {2};
  const std::vector<TokenBias> biases = {{.token = 0, .bias = 50}};
  std::vector<TokenLogprob> top(2);
  const SampledToken token = SampleOne(
      logits,
      {.temperature = 1, .top_k = 1, .banned = banned, .biases = biases, .given = 2, .top = top});
  EXPECT_TRUE(token.status.ok()) << token.status;
  EXPECT_EQ(token.token, 2);
  EXPECT_NEAR(token.logprob, std::log(0.05), 1e-6);
  EXPECT_EQ(top[0].token, 1);
  EXPECT_EQ(top[1].token, 3);
  EXPECT_EQ(SampleOne(logits, {.given = 4}).status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(SampleOne(logits, {.given = -2}).status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(SampleOne({1, kNan}, {.given = 0}).status.code(), absl::StatusCode::kDataLoss);
}

TEST(Sampling, ExtremeTemperaturesAndLogitsAreSafe) {
  constexpr float kHuge = std::numeric_limits<float>::max();
  constexpr float kTiny = std::numeric_limits<float>::denorm_min();
  EXPECT_EQ(SampleOne({1, 2, 1.999f}, {.temperature = kTiny}).token, 1);
  EXPECT_EQ(SampleOne({-kHuge, kHuge}, {.temperature = 1}).token, 1);
  EXPECT_EQ(SampleOne({-kHuge, kHuge}, {}).logprob, 0);
  EXPECT_EQ(Support({0, 80}, {.temperature = kHuge}), (Ids{0, 1}));
  EXPECT_EQ(Support({kHuge, kHuge}, {.temperature = 1, .top_p = 0.9f}), (Ids{0, 1}));
}

TEST(Sampling, NonFiniteLogitsFailTheirRowOnly) {
  SerialExecutor executor;
  const std::vector<std::vector<float>> rows = {
      {1, 5, 2}, {1, kNan, 2}, {kInf, 1, 2}, {1, 2, -kInf}, {3, 2, 1}};
  const std::vector<SampledToken> tokens =
      SampleRows(rows, std::vector<SamplingOptions>(5), executor);
  EXPECT_EQ(tokens[0].token, 1);
  EXPECT_EQ(tokens[4].token, 0);
  for (size_t r : {1u, 2u, 3u}) {
    EXPECT_EQ(tokens[r].status.code(), absl::StatusCode::kDataLoss) << r;
    EXPECT_EQ(tokens[r].token, -1);
  }
  EXPECT_NE(tokens[1].status.message().find("token 1 is nan"), absl::string_view::npos)
      << tokens[1].status;
}

TEST(Sampling, OptionsOutOfRangeFailTheirRow) {
  const Ids all = {0, 1}, outside = {2}, negative = {-1};
  const std::vector<TokenBias> no_token = {{.token = 2}}, nan = {{.token = 0, .bias = kNan}},
                               infinite = {{.token = 0, .bias = -kInf}};
  const SamplingOptions bad[] = {{.temperature = -1},
                                 {.temperature = kNan},
                                 {.temperature = kInf},
                                 {.temperature = 1, .top_k = -1},
                                 {.temperature = 1, .top_p = 0},
                                 {.temperature = 1, .top_p = 1.5f},
                                 {.temperature = 1, .top_p = kNan},
                                 {.banned = all},
                                 {.banned = outside},
                                 {.min_p = -0.1f},
                                 {.min_p = 1.1f},
                                 {.min_p = kNan},
                                 {.biases = no_token},
                                 {.biases = nan},
                                 {.biases = infinite},
                                 {.repetition_penalty = 0},
                                 {.repetition_penalty = -1},
                                 {.repetition_penalty = kInf},
                                 {.frequency_penalty = kNan},
                                 {.presence_penalty = -kInf},
                                 {.repetition_penalty = 2, .prompt = outside},
                                 {.presence_penalty = 2, .output = negative},
                                 {.temperature = 1, .banned = negative}};
  for (const SamplingOptions& options : bad) {
    const SampledToken token = SampleOne({1, 2}, options);
    EXPECT_EQ(token.status.code(), absl::StatusCode::kInvalidArgument) << token.status;
    EXPECT_EQ(token.token, -1);
  }
}

TEST(Sampling, LogprobsThatAreNotWantedAreNotComputedAndChangeNoToken) {
  const std::vector<float> logits = LogOf({0.15, 0.5, 0.05, 0.3});
  for (const float temperature : {0.0f, 1.0f}) {
    const SampledToken with = SampleOne(logits, {.temperature = temperature});
    const SampledToken without =
        SampleOne(logits, {.temperature = temperature, .wants_logprob = false});
    EXPECT_EQ(without.token, with.token);
    EXPECT_LT(with.logprob, 0);
    EXPECT_EQ(without.logprob, 0);
  }
  std::vector<TokenLogprob> top(1);
  EXPECT_LT(SampleOne(logits, {.wants_logprob = false, .top = top}).logprob, 0);
  EXPECT_EQ(top[0].token, 1);
}

TEST(Sampling, WeightsAreTheExponentialInUnitsOfTwoToTheMinusForty) {
  EXPECT_EQ(WeightOf(5, 5, 1), kLargestWeight);
  EXPECT_EQ(WeightOf(-kInf, 5, 1), 0u);
  EXPECT_EQ(WeightOf(-28, 0, 1), 0u);
  for (float x = 0; x > -29; x -= 0.0137f) {
    const double exact = std::exp(static_cast<double>(x)) * static_cast<double>(kLargestWeight);
    EXPECT_NEAR(static_cast<double>(WeightOf(x, 0, 1)), exact, 1 + 1e-6 * exact) << x;
  }
  EXPECT_EQ(WeightOf(1, 2, 0.5f), WeightOf(2, 4, 1));
}

TEST(Sampling, NoRowsAreNoWorkAndBadArgumentsAreErrors) {
  SerialExecutor executor;
  float logits[6] = {};
  auto scratch = HostBuffer::Allocate(SamplingScratchBytes(3, 1));
  ASSERT_TRUE(scratch.ok());
  std::vector<SamplingOptions> options(2);
  std::vector<SampledToken> tokens(2);
  using absl::StatusCode;
  SamplingParams params = {
      .logits = TensorView(logits, DType::kFloat32, {2, 3}),
      .options = options,
      .tokens = tokens,
      .scratch = {scratch->data(), static_cast<size_t>(scratch->size_bytes())}};
  EXPECT_EQ(Sample(params, executor).code(), StatusCode::kOk);
  params.scratch = params.scratch.first(100);
  EXPECT_EQ(Sample(params, executor).code(), StatusCode::kInvalidArgument);
  params.scratch = {scratch->data(), static_cast<size_t>(scratch->size_bytes())};
  params.tokens = std::span(tokens).first(1);
  EXPECT_EQ(Sample(params, executor).code(), StatusCode::kInvalidArgument);
  params.tokens = tokens;
  params.logits = TensorView(logits, DType::kFloat32, {2, 3}, Device::kCuda);
  EXPECT_EQ(Sample(params, executor).code(), StatusCode::kUnimplemented);
  params = {.logits = TensorView(nullptr, DType::kFloat32, {0, 3}),
            .options = {},
            .tokens = {},
            .scratch = params.scratch};
  EXPECT_EQ(Sample(params, executor).code(), StatusCode::kOk);
}

}  // namespace
}  // namespace kvasir::kernels
