// Sampled tokens, penalties, logprobs and stop tokens of the engine.
#include <algorithm>
#include <cmath>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/worker/engine_fixture.h"
#include "worker/engine/engine.h"

namespace kvasir::worker {
namespace {

TEST_F(EngineTest, SampledTokensDependOnSeedAndPositionOnly) {
  TestRequest request = MakeRequest(100, kAll);
  request.sampling.set_temperature(1.5);
  request.sampling.set_seed(42);
  const auto tokens = [&](int others) {
    TestWorker worker(*model_);
    TestCoordinator coordinator({.chunk = 64});
    for (int i = 0; i < others; ++i) {
      coordinator.Add(MakeRequest(90, kAll, static_cast<uint32_t>(i)));
    }
    const size_t r = coordinator.Add(request);
    worker.Run(coordinator);
    return coordinator.result(r).tokens;
  };
  const std::vector<uint32_t> alone = tokens(0);
  EXPECT_EQ(alone, tokens(5));
  request.sampling.set_seed(43);
  EXPECT_NE(alone, tokens(0));
}

// A request that repeats itself unless it is penalised.
TestRequest PenalisedRequest() {
  TestRequest request = MakeRequest(300, kAll);
  request.max_tokens = 24;
  request.sampling.set_repetition_penalty(1.2f);
  request.sampling.set_frequency_penalty(0.3f);
  request.sampling.set_presence_penalty(0.2f);
  request.sampling.set_logprobs(5);
  v1::LogitBias& bias = *request.sampling.add_logit_bias();
  bias.set_token_id(17);
  bias.set_bias(0.5f);
  return request;
}

// The definition, computed from the raw logits and the tokens so far.
uint32_t DefinedToken(TestWorker::Logits logits, const TestRequest& request,
                      const std::vector<uint32_t>& output) {
  const v1::RowSampling& sampling = request.sampling;
  for (const v1::LogitBias& bias : sampling.logit_bias()) logits[bias.token_id()] += bias.bias();
  std::set<uint32_t> seen(request.prompt.begin(), request.prompt.end());
  seen.insert(output.begin(), output.end());
  for (const uint32_t token : seen) {
    float& logit = logits[token];
    logit =
        logit > 0 ? logit / sampling.repetition_penalty() : logit * sampling.repetition_penalty();
    const auto count = std::count(output.begin(), output.end(), token);
    if (count == 0) continue;
    logit -= static_cast<float>(count) * sampling.frequency_penalty() + sampling.presence_penalty();
  }
  return static_cast<uint32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

TEST_F(EngineTest, PenaltiesCountTheSequencesOwnTokensAndLogprobsAreTheModels) {
  const TestRequest request = PenalisedRequest();
  TestWorker worker(*model_);
  TestCoordinator coordinator({.chunk = 128});
  const size_t r = coordinator.Add(request);
  worker.Run(coordinator);
  const TestResult& result = coordinator.result(r);
  TestRequest free = request;
  free.sampling = Greedy();
  TestCoordinator without({.chunk = 128});
  const size_t f = without.Add(free);
  TestWorker other(*model_);
  other.Run(without);
  EXPECT_NE(result.tokens, without.result(f).tokens) << "the penalties changed nothing";

  for (size_t i = 0; i < result.tokens.size(); ++i) {
    const auto position = static_cast<int64_t>(request.prompt.size() + i) - 1;
    const TestWorker::Logits& logits = worker.logits().at({0, position});
    const std::vector<uint32_t> output(result.tokens.begin(),
                                       result.tokens.begin() + static_cast<std::ptrdiff_t>(i));
    EXPECT_EQ(result.tokens[i], DefinedToken(logits, request, output)) << "token " << i;
    double sum = 0;
    for (const float logit : logits) sum += std::exp(static_cast<double>(logit));
    const v1::TokenLogprobs& logprobs = result.logprobs[i];
    EXPECT_NEAR(logprobs.logprob(), static_cast<double>(logits[result.tokens[i]]) - std::log(sum),
                1e-5);
    ASSERT_EQ(logprobs.top_size(), 5);
    TestWorker::Logits sorted = logits;
    std::sort(sorted.begin(), sorted.end(), std::greater<>());
    for (int n = 0; n < 5; ++n) {
      EXPECT_EQ(logits[logprobs.top(n).token_id()], sorted[static_cast<size_t>(n)]);
      EXPECT_NEAR(logprobs.top(n).logprob(),
                  static_cast<double>(sorted[static_cast<size_t>(n)]) - std::log(sum), 1e-5);
    }
  }
}

TEST_F(EngineTest, PenaltiesAndLogprobsDoNotDependOnNeighboursChunksOrPreemption) {
  const TestRequest penalised = PenalisedRequest();
  const auto run = [&](const TestRequest& request, int others, int64_t chunk) {
    TestWorker worker(*model_);
    TestCoordinator coordinator({.chunk = chunk});
    for (int i = 0; i < others; ++i) {
      coordinator.Add(MakeRequest(90 + 40 * i, kAll, static_cast<uint32_t>(i)));
    }
    const size_t r = coordinator.Add(request);
    worker.Run(coordinator);
    const TestResult& result = coordinator.result(r);
    std::vector<std::string> answer;
    for (size_t i = 0; i < result.tokens.size(); ++i) {
      answer.push_back(absl::StrCat(result.tokens[i], ":", result.logprobs[i].SerializeAsString()));
    }
    return answer;
  };
  const std::vector<std::string> alone = run(penalised, 0, 512);
  EXPECT_EQ(alone.size(), 24u);
  EXPECT_EQ(alone, run(penalised, 0, 64));
  EXPECT_EQ(alone, run(penalised, 6, 128));
  // Preempted after its tenth token: tokens generated before still count as output.
  TestRequest resumed = penalised;
  for (size_t i = 0; i < 10; ++i) {
    resumed.generated.push_back(static_cast<uint32_t>(std::stoul(alone[i])));
  }
  resumed.max_tokens -= 10;
  EXPECT_EQ(std::vector(alone.begin() + 10, alone.end()), run(resumed, 2, 128));
}

TEST_F(EngineTest, StopTokensWaitForMinTokens) {
  TestRequest request = MakeRequest(100, kAll);
  const auto tokens = [&] {
    TestWorker worker(*model_);
    TestCoordinator coordinator({.chunk = 64});
    const size_t r = coordinator.Add(request);
    worker.Run(coordinator);
    return coordinator.result(r).tokens;
  };
  const std::vector<uint32_t> free = tokens();
  for (uint32_t token = 0; token < 101; ++token) {
    if (token != 5) request.sampling.add_stop_token_ids(token);
  }
  request.sampling.set_min_tokens(3);
  const std::vector<uint32_t> banned = tokens();
  EXPECT_THAT(std::vector(banned.begin(), banned.begin() + 3), testing::Each(5u));
  EXPECT_NE(banned[3], 5u);
  request.sampling.set_min_tokens(0);
  EXPECT_EQ(free, tokens());
}

}  // namespace
}  // namespace kvasir::worker
