#include "kernels/dense/sampling.h"

#include <algorithm>
#include <cmath>
#include <gtest/gtest.h>
#include <limits>
#include <map>
#include <random>
#include <vector>

#include "kernels/base/buffer.h"
#include "kernels/base/status_macros.h"
#include "tests/support/thread_executor.h"

namespace kvasir::kernels {
namespace {

using tests::ThreadExecutor;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<SampledToken> SampleRows(const std::vector<std::vector<float>>& rows,
                                     const std::vector<SamplingOptions>& options,
                                     Executor& executor) {
  std::vector<float> logits;
  for (const auto& row : rows) logits.insert(logits.end(), row.begin(), row.end());
  const auto vocab = static_cast<int64_t>(rows[0].size());
  auto scratch = HostBuffer::Allocate(SamplingScratchBytes(vocab, executor.num_threads()));
  KVASIR_CHECK(scratch.ok());
  std::vector<SampledToken> tokens(rows.size());
  const absl::Status status =
      Sample({.logits = TensorView(logits.data(), DType::kFloat32,
                                   {static_cast<int64_t>(rows.size()), vocab}),
              .options = options,
              .tokens = tokens,
              .scratch = {scratch->data(), static_cast<size_t>(scratch->size_bytes())}},
             executor);
  EXPECT_TRUE(status.ok()) << status;
  return tokens;
}

SampledToken SampleOne(const std::vector<float>& logits, const SamplingOptions& options) {
  SerialExecutor executor;
  return SampleRows({logits}, {options}, executor)[0];
}

// How often each token comes out over `n` positions.
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

// After temperature 0.5 the shares are those of p squared; after top-k 2 those of the two largest.
TEST(Sampling, TopPComesAfterTemperatureAndTopK) {
  const std::vector<float> logits = LogOf({0.4, 0.3, 0.2, 0.1});
  EXPECT_EQ(Support(logits, {.temperature = 1, .top_p = 0.5f}), (Ids{0, 1}));
  EXPECT_EQ(Support(logits, {.temperature = 0.5f, .top_p = 0.5f}), (Ids{0}));
  EXPECT_EQ(Support(logits, {.temperature = 1, .top_k = 2, .top_p = 0.55f}), (Ids{0}));
}

TEST(Sampling, SameSeedAndPositionGiveTheSameTokenWhateverTheBatchAndThreads) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<std::vector<float>> rows(40, std::vector<float>(1000));
  std::vector<SamplingOptions> options;
  for (auto& row : rows) {
    for (float& logit : row) logit = normal(random);
    options.push_back({.temperature = 1.5f,
                       .top_k = options.size() % 2 == 0 ? 0 : 50,
                       .top_p = options.size() % 3 == 0 ? 1.0f : 0.9f,
                       .seed = 0xfedcba9876543210u + options.size() % 5,
                       .position = static_cast<int64_t>(options.size()) % 7});
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
  const SamplingOptions bad[] = {{.temperature = -1},
                                 {.temperature = kNan},
                                 {.temperature = kInf},
                                 {.temperature = 1, .top_k = -1},
                                 {.temperature = 1, .top_p = 0},
                                 {.temperature = 1, .top_p = 1.5f},
                                 {.temperature = 1, .top_p = kNan},
                                 {.banned = all},
                                 {.banned = outside},
                                 {.temperature = 1, .banned = negative}};
  for (const SamplingOptions& options : bad) {
    const SampledToken token = SampleOne({1, 2}, options);
    EXPECT_EQ(token.status.code(), absl::StatusCode::kInvalidArgument) << token.status;
    EXPECT_EQ(token.token, -1);
  }
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
