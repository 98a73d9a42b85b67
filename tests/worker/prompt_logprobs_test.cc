// Log probabilities of the tokens of a prompt, from plans to answers.
#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/worker/engine_fixture.h"
#include "tests/worker/rank_group.h"
#include "worker/engine/engine.h"

namespace kvasir::worker {
namespace {

constexpr uint32_t kTop = 4;

TestRequest ScoredRequest(int64_t prompt_size, uint32_t policy, uint32_t seed = 7) {
  TestRequest request = MakeRequest(prompt_size, policy, seed);
  request.sampling.set_prompt_logprobs(kTop);
  request.score_begin = 0;
  request.max_tokens = 3;
  return request;
}

class PromptLogprobsTest : public EngineTest {
 protected:
  // Returns the scores of the request in an engine of its own, beside unscored neighbours.
  static v1::PromptLogprobs Score(const TestRequest& request, int64_t chunk, int neighbours = 0) {
    TestWorker worker(*model_);
    TestCoordinator coordinator({.chunk = chunk});
    for (int i = 0; i < neighbours; ++i) {
      coordinator.Add(MakeRequest(90 + 40 * i, kAll, static_cast<uint32_t>(i)));
    }
    const size_t r = coordinator.Add(request);
    worker.Run(coordinator);
    EXPECT_TRUE(coordinator.result(r).status.ok()) << coordinator.result(r).status;
    return coordinator.result(r).prompt_logprobs;
  }
};

// The definition, from the logits that a request for each beginning of the prompt is sampled from.
TEST_F(PromptLogprobsTest, AreTheModelsForEveryTokenGivenThoseBeforeIt) {
  const TestRequest request = ScoredRequest(150, kAll);
  const v1::PromptLogprobs scores = Score(request, 512);
  ASSERT_EQ(scores.index(), 1u);
  ASSERT_EQ(scores.logprobs_size(), 149);
  ASSERT_EQ(scores.top_count(), kTop);
  for (int64_t size = 1; size < 150; ++size) {
    TestRequest beginning = request;
    beginning.prompt.resize(static_cast<size_t>(size));
    beginning.score_begin = {};
    beginning.max_tokens = 1;
    const TestWorker::Logits logits = RunAlone(beginning).at({0, size - 1});
    double sum = 0;
    for (const float logit : logits) sum += std::exp(static_cast<double>(logit));
    const auto logprob = [&](uint32_t token) {
      return static_cast<double>(logits[token]) - std::log(sum);
    };
    const auto i = static_cast<int>(size - 1);
    EXPECT_NEAR(scores.logprobs(i), logprob(request.prompt[static_cast<size_t>(size)]), 1e-5);
    TestWorker::Logits sorted = logits;
    std::sort(sorted.begin(), sorted.end(), std::greater<>());
    for (int n = 0; n < static_cast<int>(kTop); ++n) {
      const int at = i * static_cast<int>(kTop) + n;
      EXPECT_EQ(logits[scores.top_token_ids(at)], sorted[static_cast<size_t>(n)]);
      EXPECT_NEAR(scores.top_logprobs(at), logprob(scores.top_token_ids(at)), 1e-5);
    }
  }
}

// A step holds logits of 64 rows, so these prompts take up to five groups of rows.
TEST_F(PromptLogprobsTest, HaveTheSameBitsWhateverTheChunksTheNeighboursAndThePolicy) {
  for (const uint32_t policy : {kAll, kStreaming, kQuest, kAllThenQuest, kHip, kInfiniteHip}) {
    SCOPED_TRACE(testing::Message() << "policy " << policy);
    const TestRequest request = ScoredRequest(300, policy);
    const v1::PromptLogprobs whole = Score(request, 512);
    EXPECT_EQ(whole.logprobs_size(), 299);
    EXPECT_EQ(whole.top_token_ids_size(), 299 * static_cast<int>(kTop));
    EXPECT_EQ(whole.SerializeAsString(), Score(request, 64).SerializeAsString());
    EXPECT_EQ(whole.SerializeAsString(), Score(request, 192, 5).SerializeAsString());
  }
}

TEST_F(PromptLogprobsTest, ChangeNoAnswer) {
  TestRequest request = ScoredRequest(200, kQuest);
  const AllLogits scored = RunAlone(request);
  request.score_begin = {};
  ExpectSameBits(RunAlone(request), scored);
}

// Preempted while its prompt was read: it starts again on its own blocks, or on none, and is scored
// from where it was.
TEST_F(PromptLogprobsTest, OfARequestThatStartsAgainAreTheRestOfTheSame) {
  const TestRequest request = ScoredRequest(300, kAll);
  const v1::PromptLogprobs whole = Score(request, 512);
  TestWorker worker(*model_);
  TestCoordinator coordinator({.chunk = 128, .keep_blocks = true});
  const size_t before = coordinator.Add(MakeRequest(300, kAll));
  worker.Run(coordinator);
  for (const size_t cached : {size_t{2}, size_t{0}}) {
    TestRequest again = request;
    again.score_begin = 128;
    const std::vector<uint64_t>& blocks = coordinator.result(before).blocks;
    again.cached_blocks.assign(blocks.begin(),
                               blocks.begin() + static_cast<std::ptrdiff_t>(cached));
    const size_t r = coordinator.Add(again);
    worker.Run(coordinator);
    const v1::PromptLogprobs& rest = coordinator.result(r).prompt_logprobs;
    ASSERT_EQ(rest.index(), 129u);
    ASSERT_EQ(rest.logprobs_size(), 171);
    for (int i = 0; i < 171; ++i) EXPECT_EQ(rest.logprobs(i), whole.logprobs(128 + i));
  }
}

TEST_F(PromptLogprobsTest, MoreMostProbableTokensThanTheVocabularyAreAllOfIt) {
  TestRequest request = ScoredRequest(70, kAll);
  request.sampling.set_prompt_logprobs(1000);
  const v1::PromptLogprobs scores = Score(request, 512);
  EXPECT_EQ(scores.top_count(), 101u);
  double sum = 0;
  for (int i = 0; i < 101; ++i) sum += std::exp(static_cast<double>(scores.top_logprobs(i)));
  EXPECT_NEAR(sum, 1, 1e-5);
}

TEST_F(PromptLogprobsTest, PlansThatScoreWhatTheyDoNotComputeAreRefused) {
  const auto planned = [](uint32_t begin, uint32_t end) {
    TestWorker worker(*model_);
    TestCoordinator coordinator({.chunk = 128});
    coordinator.Add(MakeRequest(300, kAll));
    const v1::StepPlan first = coordinator.NextPlan();
    const auto reply = worker.engine().Step(first);
    EXPECT_TRUE(reply.ok()) << reply.status();
    coordinator.Apply(first, *reply);
    v1::StepPlan plan = coordinator.NextPlan();  // positions [128, 256)
    plan.mutable_rows(0)->set_score_begin(begin);
    plan.mutable_rows(0)->set_score_end(end);
    return worker.engine().Step(plan).status().code();
  };
  EXPECT_EQ(planned(128, 256), absl::StatusCode::kOk);
  EXPECT_EQ(planned(127, 256), absl::StatusCode::kInternal);
  EXPECT_EQ(planned(128, 257), absl::StatusCode::kInternal);
  EXPECT_EQ(planned(200, 199), absl::StatusCode::kInternal);
  EXPECT_EQ(planned(0xFFFFFFFFu, 0), absl::StatusCode::kInternal);
}

// The vocabulary is split over ranks, and each holds the logits of all; one of them answers.
TEST_F(PromptLogprobsTest, OfTwoRanksAreThoseOfOneAndComeOnce) {
  RankGroup group({.model = {.folder = folder_->folder(), .edit_weights = {}}, .size = 2});
  TestCoordinator coordinator({.chunk = 128});
  const TestRequest request = ScoredRequest(300, kQuest);
  const v1::PromptLogprobs one = Score(request, 128);
  const size_t r = coordinator.Add(request);
  v1::StepPlan plan = coordinator.NextPlan();
  const auto replies = group.Step(plan);
  ASSERT_TRUE(replies[0].ok() && replies[1].ok()) << replies[0].status() << replies[1].status();
  EXPECT_EQ(replies[0]->results(0).prompt_logprobs().logprobs_size(), 128);
  EXPECT_FALSE(replies[1]->results(0).has_prompt_logprobs());
  coordinator.Apply(plan, *replies[0]);
  group.Run(coordinator);
  const v1::PromptLogprobs& two = coordinator.result(r).prompt_logprobs;
  ASSERT_EQ(two.logprobs_size(), 299);
  for (int i = 0; i < 299; ++i) EXPECT_NEAR(two.logprobs(i), one.logprobs(i), 1e-4) << i;
}

}  // namespace
}  // namespace kvasir::worker
