// What becomes of requests when the worker group is lost.
#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "coordinator/engine_loop.h"
#include "tests/coordinator/engine_loop_fixture.h"

namespace kvasir::coordinator {
namespace {

using ::testing::HasSubstr;

class EngineLossTest : public EngineLoopTest {
 protected:
  // The step that runs, or the next one, is never answered.
  void LoseInAStep(const absl::Status& why = absl::UnavailableError("worker 1 died")) {
    group_.FailNextStep(why);
    group_.AllowSteps(1);
  }
  // Lets the pause pass after which the group forms again, for the n-th time.
  void AwaitFormBegun(int64_t n) {
    clock_.AwaitWaiter();
    clock_.Advance(absl::Seconds(11));
    ASSERT_TRUE(group_.AwaitForms(n));
  }
  // Lets it serve again.
  void AwaitGroup(int64_t n) {
    if (group_.forms() < n) AwaitFormBegun(n);
    ASSERT_EQ(loop_.WaitUntilReady(clock_.Now() + std::chrono::hours(1)), absl::OkStatus());
  }
  // The number of tokens that the client has.
  static size_t Tokens(const Submitted& submitted) {
    return submitted.response->token_ids().size();
  }
  // Answers steps until the client has `n` tokens, and one more step has begun.
  void AwaitTokens(const Submitted& submitted, size_t n) {
    while (Tokens(submitted) < n) {
      const int64_t begun = group_.steps_begun();
      group_.AllowSteps(1);
      ASSERT_TRUE(group_.AwaitStepsBegun(begun + 1));
    }
  }
  // Returns a request whose client has two tokens; one more step has begun.
  Submitted StartWithARunningRequest() {
    StartAndAwaitReady();
    group_.HoldSteps();
    Submitted submitted = Submit({1, 2, 3}, 10);
    AwaitTokens(submitted, 2);
    return submitted;
  }
  // The next group begins to form, and does not end before it may.
  void LoseInAStepAndHoldTheNextGroup() {
    group_.HoldForms();
    LoseInAStep();
    AwaitFormBegun(2);
  }
  void LetTheNextGroupServe() {
    group_.ReleaseSteps();
    group_.ReleaseForms();
    AwaitGroup(2);
  }
  static std::vector<int32_t> Expected(const std::vector<int32_t>& prompt, int64_t max_tokens,
                                       const v1::RowSampling& sampling = {}) {
    return SymbolicWorker::ExpectedTokens(prompt, max_tokens, sampling, 128);
  }
};

// Bug: a lost rank ended every request.
TEST_F(EngineLossTest, WhenAStepFailsEveryRequestGoesOnWithTheNextGroup) {
  StartAndAwaitReady();
  group_.HoldSteps();
  const std::vector<int32_t> prompt(100, 1);
  Submitted running = Submit(prompt, 10);
  AwaitTokens(running, 3);
  Submitted queued = Submit({1, 2}, 10);  // arrives while the step runs
  LoseInAStep();
  clock_.AwaitWaiter();
  EXPECT_FALSE(running.response->closed());
  group_.ReleaseSteps();
  AwaitGroup(2);
  EXPECT_EQ(running.response->status(), absl::OkStatus());
  EXPECT_EQ(running.response->token_ids(), Expected(prompt, 10));  // which checks the indices
  EXPECT_EQ(running.response->finish().usage().completion_tokens(), 10u);
  EXPECT_EQ(queued.response->status(), absl::OkStatus());
  EXPECT_EQ(queued.response->token_ids(), Expected({1, 2}, 10));
  EXPECT_EQ(loop_.ServedGroup()->epoch, 2u);
  const std::string text = MetricsText();
  for (const char* line :
       {"kvasir_worker_group_losses_total{model_name=\"test\"} 1",
        "kvasir_num_preemptions_total{model_name=\"test\",kind=\"loss\"} 1",
        "kvasir_requests_resumed_total{model_name=\"test\",from=\"recompute\"} 1",
        "kvasir_request_success_total{model_name=\"test\",finished_reason=\"error\"} 0",
        "kvasir_prompt_tokens_total{model_name=\"test\"} 102"}) {
    EXPECT_THAT(text, HasSubstr(line));
  }
}

TEST_F(EngineLossTest, APromptThatIsBeingReadIsReadAgain) {
  StartAndAwaitReady();
  group_.HoldSteps();
  const std::vector<int32_t> prompt(1000, 3);
  const int64_t steps = group_.steps_begun();
  Submitted reading = Submit(prompt, 4);  // eight steps
  ASSERT_TRUE(group_.AwaitStepsBegun(steps + 1));
  group_.AllowSteps(3);
  ASSERT_TRUE(group_.AwaitStepsBegun(steps + 4));
  LoseInAStep();
  group_.ReleaseSteps();
  AwaitGroup(2);
  EXPECT_EQ(reading.response->status(), absl::OkStatus());
  EXPECT_EQ(reading.response->token_ids(), Expected(prompt, 4));
  EXPECT_THAT(MetricsText(), HasSubstr("kvasir_prompt_tokens_total{model_name=\"test\"} 1000"));
}

TEST_F(EngineLossTest, SamplingAndStopsGoOnWhereTheyWere) {
  StartAndAwaitReady();
  const std::vector<int32_t> prompt = {5, 6};
  ParsedRequest parsed = {.prompt = prompt, .max_tokens = 60};
  parsed.sampling.set_seed(77);
  parsed.sampling.set_logprobs(2);
  const std::vector<int32_t> all = Expected(prompt, 60, parsed.sampling);
  // A stop string of two tokens, of which one comes before the loss and one after it.
  const size_t stop_at = 30;
  parsed.stop_strings = {
      std::string({static_cast<char>(all[stop_at - 1]), static_cast<char>(all[stop_at])})};
  group_.HoldSteps();
  Submitted submitted = Submit(std::move(parsed));
  AwaitTokens(submitted, stop_at);
  LoseInAStep();
  group_.ReleaseSteps();
  AwaitGroup(2);
  EXPECT_EQ(submitted.response->status(), absl::OkStatus());
  EXPECT_EQ(submitted.response->token_ids(),
            std::vector<int32_t>(all.begin(), all.begin() + stop_at + 1));
  EXPECT_EQ(submitted.response->text(),
            std::string(all.begin(), all.begin() + stop_at - 1));  // without the stop string
  EXPECT_EQ(submitted.response->finish().reason(), v1::FINISH_REASON_STOP);
  size_t logprobs = 0;
  for (const v1::GenerateResponse& message : submitted.response->messages()) {
    logprobs += static_cast<size_t>(message.tokens().logprobs_size());
  }
  EXPECT_EQ(logprobs, stop_at + 1);
}

TEST_F(EngineLossTest, ClientsAreToldThatTheyWait) {
  Submitted submitted = StartWithARunningRequest();
  LoseInAStepAndHoldTheNextGroup();
  const v1::GenerateResponse last = submitted.response->messages().back();
  EXPECT_TRUE(last.progress().waits_for_worker());
  EXPECT_EQ(last.progress().processed_tokens(), 3u);
  EXPECT_EQ(running_.List(1, clock_.Now())[0].state(), v1::REQUEST_STATE_RESUMING);
  EXPECT_EQ(loop_.status().scheduler.waiting, 1);
  LetTheNextGroupServe();
  EXPECT_EQ(submitted.response->status(), absl::OkStatus());
}

TEST_F(EngineLossTest, NewRequestsAreRefusedUntilTheNextGroupServes) {
  Submitted submitted = StartWithARunningRequest();
  LoseInAStepAndHoldTheNextGroup();
  const absl::Status refused = Submit({1}, 1).response->status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("worker 1 died"));
  LetTheNextGroupServe();
  EXPECT_EQ(Submit({1, 2}, 3).response->status(), absl::OkStatus());
}

TEST_F(EngineLossTest, WhoWaitsForAGroupCanLeaveOrRunOutOfTime) {
  StartAndAwaitReady();
  group_.HoldSteps();
  Submitted leaves = Submit({1, 2, 3}, 50);
  AwaitTokens(leaves, 2);
  clock_.Advance(absl::Minutes(30));
  Submitted stays = Submit({4, 5, 6}, 50);
  AwaitTokens(stays, 2);
  Submitted late = Submit({7, 8, 9}, 50);
  AwaitTokens(late, 2);
  LoseInAStepAndHoldTheNextGroup();
  loop_.Cancel(leaves.id, absl::CancelledError("the client is gone"));
  EXPECT_EQ(leaves.response->status(), absl::CancelledError("the client is gone"));
  clock_.AwaitWaiter();
  clock_.Advance(absl::Minutes(59));
  EXPECT_FALSE(stays.response->closed());
  clock_.Advance(absl::Minutes(2));
  EXPECT_EQ(stays.response->status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(late.response->status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(loop_.WaitUntilIdle(clock_.Now() + std::chrono::hours(1)));
}

TEST_F(EngineLossTest, ThreeLossesWithoutATokenEndTheRequestThatWasThere) {
  StartAndAwaitReady();
  group_.HoldSteps();
  const std::vector<int32_t> prompt(1000, 2);
  Submitted killer = Submit(prompt, 10);
  for (int64_t n = 1; n <= 3; ++n) {
    EXPECT_FALSE(killer.response->closed());
    LoseInAStep(absl::UnavailableError(absl::StrCat("death ", n)));
    if (n < 3) AwaitGroup(n + 1);
  }
  const absl::Status status = killer.response->status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("lost 3 times"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("death 3"));
  group_.ReleaseSteps();
  AwaitGroup(4);
  EXPECT_EQ(Submit({1, 2}, 3).response->status(), absl::OkStatus());
}

TEST_F(EngineLossTest, ATokenBetweenLossesIsProgress) {
  StartAndAwaitReady();
  group_.HoldSteps();
  const std::vector<int32_t> prompt(100, 2);
  Submitted submitted = Submit(prompt, 30);
  for (size_t n = 1; n <= 6; ++n) {
    AwaitTokens(submitted, 4 * n);
    LoseInAStep();
    AwaitGroup(static_cast<int64_t>(n) + 1);
  }
  group_.ReleaseSteps();
  EXPECT_EQ(submitted.response->status(), absl::OkStatus());
  EXPECT_EQ(submitted.response->token_ids(), Expected(prompt, 30));
}

// A rank found that an invariant broke, or answers what was not asked.
TEST_F(EngineLossTest, AReplyThatDoesNotFitItsPlanIsALoss) {
  StartAndAwaitReady();
  group_.CorruptNextReply([](v1::StepReply& reply) { reply.set_step(99); });
  Submitted submitted = Submit({1, 2}, 10);
  AwaitGroup(2);
  EXPECT_EQ(submitted.response->status(), absl::OkStatus());
  EXPECT_EQ(submitted.response->token_ids(), Expected({1, 2}, 10));
}

TEST_F(EngineLossTest, AFaultOfTheServiceThatComesAgainIsToldAsOne) {
  StartAndAwaitReady();
  group_.HoldSteps();
  Submitted submitted = Submit({1, 2}, 10);
  for (int64_t n = 1; n <= 3; ++n) {
    LoseInAStep(absl::InternalError("ranks disagree"));
    if (n < 3) AwaitGroup(n + 1);
  }
  EXPECT_EQ(submitted.response->status().code(), absl::StatusCode::kInternal);
}

TEST_F(EngineLossTest, TheServersEndEndsThoseThatWaitForAGroup) {
  Submitted submitted = StartWithARunningRequest();
  LoseInAStepAndHoldTheNextGroup();
  loop_.Stop(absl::UnavailableError("bye"));
  EXPECT_EQ(submitted.response->status(), absl::UnavailableError("bye"));
}

TEST_F(EngineLossTest, ADrainIsNotOverBeforeThoseThatWaitForAGroupAreAnswered) {
  Submitted submitted = StartWithARunningRequest();
  loop_.Drain();
  LoseInAStepAndHoldTheNextGroup();
  EXPECT_FALSE(loop_.WaitUntilIdle(clock_.Now()));
  group_.ReleaseSteps();
  group_.ReleaseForms();
  EXPECT_EQ(submitted.response->status(), absl::OkStatus());
  EXPECT_TRUE(loop_.WaitUntilIdle(clock_.Now() + std::chrono::hours(1)));
}

TEST_F(EngineLossTest, ALossIsNoticedWhileNothingRuns) {
  StartAndAwaitReady();
  group_.Lose(absl::UnavailableError("worker 0 died"));
  clock_.AwaitWaiter();  // it pauses before it tries again
  EXPECT_EQ(loop_.ServedGroup().status().code(), absl::StatusCode::kUnavailable);
  clock_.Advance(absl::Seconds(1));
  EXPECT_TRUE(group_.AwaitForms(2));
}

TEST_F(EngineLossTest, WhatALostGroupStoredIsRestoredByTheNext) {
  StartAndAwaitReady();
  const std::vector<int32_t> prompt(200, 7);
  EXPECT_EQ(Submit(prompt, 1).response->status(), absl::OkStatus());
  ASSERT_TRUE(group_.AwaitIdle(3));
  ASSERT_TRUE(group_.AwaitStored(3));
  group_.Lose(absl::UnavailableError("worker 0 is dead"));
  clock_.AwaitWaiter();
  clock_.Advance(absl::Milliseconds(101));
  ASSERT_TRUE(group_.AwaitForms(2));
  ASSERT_EQ(loop_.WaitUntilReady(clock_.Now() + std::chrono::hours(1)), absl::OkStatus());
  const auto [id, response] = Submit(prompt, 3);
  EXPECT_EQ(response->status(), absl::OkStatus());
  EXPECT_EQ(response->token_ids(), SymbolicWorker::ExpectedTokens(prompt, 3, {}, 128));
  EXPECT_EQ(group_.disk_reads(), 3);
}

}  // namespace
}  // namespace kvasir::coordinator
