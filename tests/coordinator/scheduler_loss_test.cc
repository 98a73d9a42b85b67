// What becomes of sequences when their worker group is lost, and the next one takes them over.
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "coordinator/scheduling/scheduler.h"
#include "coordinator/scheduling/survivors.h"
#include "tests/coordinator/scheduler_fixture.h"

namespace kvasir::coordinator {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class SchedulerLossTest : public SchedulerTest {
 protected:
  // A plan goes out and is never answered.
  void PlanInVain() { Collect(scheduler_->NextPlan(now_).events); }
};

TEST_F(SchedulerLossTest, AnAnswerGoesOnAtItsNextToken) {
  Make({});
  SequenceSpec spec = Spec(Prompt(100), 50);
  spec.sampling.set_seed(9);
  spec.sampling.set_min_tokens(20);
  spec.sampling.add_stop_token_ids(7);
  const std::vector<int32_t> expected = Expected(spec);
  const SequenceId id = Add(std::move(spec));
  while (tokens_[id].size() < 10) ASSERT_TRUE(Step());
  PlanInVain();
  EXPECT_EQ(Survive({}), 1);
  ASSERT_TRUE(Step());
  EXPECT_THAT(plan_.starts(0).tokens(), SizeIs(110));
  EXPECT_EQ(plan_.starts(0).num_prompt_tokens(), 100u);
  EXPECT_EQ(plan_.starts(0).sampling().seed(), 9u);
  EXPECT_THAT(tokens_[id], SizeIs(11));
  RunUntilIdle();
  EXPECT_EQ(tokens_[id], expected);
  EXPECT_THAT(progress_[id], SizeIs(2));  // that of the start, once
  EXPECT_EQ(scheduler_->stats().resumed_recompute, 1);
}

// Bug: it counted as preempted, so that its prompt was never counted as looked up nor as cached.
// Resumed by its client, after the coordinator was lost.
TEST_F(SchedulerLossTest, AnAnswerThatAClientBringsGoesOnAmongItsBlocks) {
  constexpr SymbolicWorkerOptions kWithDisk = {.disk_blocks = 100};
  Make(kWithDisk);
  SequenceSpec spec = Spec(Prompt(300), 200);
  spec.policy = SparsePolicy(64);
  const std::vector<int32_t> expected = Expected(spec);
  SequenceSpec resumed = spec;
  Add(std::move(spec));
  while (tokens_[SequenceId(0)].size() < 150) ASSERT_TRUE(Step());
  scheduler_->Cancel(SequenceId(0), absl::CancelledError(""), now_);
  RunUntilIdle();
  ASSERT_EQ(worker_->num_stored(), 3);  // [0, 236) is what the prefill part reads
  Restart(kWithDisk);
  resumed.id = SequenceId(next_id_++);
  resumed.answer.assign(expected.begin(), expected.begin() + 150);
  const SequenceId id = Add(std::move(resumed));
  RunUntilIdle();
  EXPECT_EQ(tokens_[id], expected);
  EXPECT_EQ(scheduler_->stats().resumed_disk, 1);
  EXPECT_EQ(scheduler_->stats().prefix_hits, 192);
  const v1::Usage& usage = finished_.at(id).summary.usage();
  EXPECT_EQ(usage.prompt_tokens(), 300u);
  EXPECT_EQ(usage.completion_tokens(), 200u);
  EXPECT_EQ(usage.cached_tokens().disk(), 192u);
  ASSERT_FALSE(progress_[id].empty());
  EXPECT_EQ(progress_[id].back().processed_tokens, 300);
}

TEST_F(SchedulerLossTest, AnAnswersBlocksAreNotCountedAsThoseOfItsPrompt) {
  constexpr SymbolicWorkerOptions kMemory = {};
  Make(kMemory);
  SequenceSpec spec = Spec(Prompt(100), 200);
  const std::vector<int32_t> expected = Expected(spec);
  SequenceSpec resumed = spec;
  Add(std::move(spec));
  RunUntilIdle();
  resumed.id = SequenceId(next_id_++);
  resumed.answer.assign(expected.begin(), expected.begin() + 190);
  const SequenceId id = Add(std::move(resumed));
  ASSERT_TRUE(Step());
  ASSERT_THAT(plan_.starts(0).cached_blocks(), SizeIs(4)) << "of prompt and answer";
  RunUntilIdle();
  EXPECT_EQ(tokens_[id], expected);
  EXPECT_EQ(scheduler_->stats().prefix_hits, 100);
  EXPECT_EQ(scheduler_->stats().prefix_queries, 200);
  EXPECT_EQ(scheduler_->stats().missed_unshared + scheduler_->stats().missed_absent, 100);
  EXPECT_EQ(finished_.at(id).summary.usage().cached_tokens().device(), 100u);
}

TEST_F(SchedulerLossTest, AStartWithoutAnAnswerHasNotBeen) {
  Make({.disk_blocks = 50});
  const SequenceId first = Add(Spec(Prompt(200), 1));
  RunUntilIdle();
  const SequenceId id = Add(Spec(Prompt(200), 5));
  PlanInVain();
  EXPECT_EQ(scheduler_->stats().prefix_queries, 200);  // those of the first
  EXPECT_EQ(Survive({.disk_blocks = 50}), 0);
  RunUntilIdle();
  EXPECT_EQ(finished_.at(first).status, absl::OkStatus());
  EXPECT_THAT(tokens_[id], SizeIs(5));
  EXPECT_EQ(scheduler_->stats().prefix_queries, 200);
  EXPECT_EQ(scheduler_->stats().prefix_hits, 192);
  EXPECT_EQ(finished_.at(id).summary.usage().cached_tokens().disk(), 192u);
}

TEST_F(SchedulerLossTest, AllKeepTheirPlace) {
  Make({.max_num_seqs = 3});
  std::vector<SequenceId> ids;
  for (int32_t i = 0; i < 6; ++i) ids.push_back(Add(Spec(Prompt(100, i + 1), 20)));
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(Step());
  EXPECT_EQ(scheduler_->stats().running, 3);
  EXPECT_EQ(Survive({.max_num_seqs = 3}), 3);
  EXPECT_EQ(scheduler_->stats().waiting, 6);
  ASSERT_TRUE(Step());
  std::vector<int64_t> started;
  for (const v1::SequenceStart& start : plan_.starts()) {
    started.push_back(static_cast<int64_t>(start.sequence_id()));
  }
  EXPECT_THAT(started, ElementsAre(ids[0].value, ids[1].value, ids[2].value));
  RunUntilIdle();
  for (const SequenceId id : ids) EXPECT_THAT(tokens_[id], SizeIs(20));
}

TEST_F(SchedulerLossTest, WhatTheDiskHasIsRestored) {
  const SymbolicWorkerOptions worker = {.disk_blocks = 100};
  Make(worker);
  Add(Spec(Prompt(200), 1));
  RunUntilIdle();
  const SequenceId id = Add(Spec(Prompt(200), 10));
  while (tokens_[id].size() < 3) ASSERT_TRUE(Step());
  Survive(worker);
  RunUntilIdle();
  EXPECT_THAT(tokens_[id], SizeIs(10));
  EXPECT_EQ(worker_->reads(), 3);
  EXPECT_EQ(scheduler_->stats().resumed_disk, 1);
}

// The ranks report what they adopted as they report what is on disk.
TEST_F(SchedulerLossTest, WhatMemoryHasIsRestoredWithoutADisk) {
  const SymbolicWorkerOptions worker = {.disk_blocks = 100};
  Make(worker);
  Add(Spec(Prompt(200), 1));
  RunUntilIdle();
  const SequenceId id = Add(Spec(Prompt(200), 10));
  while (tokens_[id].size() < 3) ASSERT_TRUE(Step());
  SchedulerOptions without_disk = Options(worker);
  without_disk.disk_blocks = 0;
  Survive(worker, without_disk);
  RunUntilIdle();
  EXPECT_THAT(tokens_[id], SizeIs(10));
  EXPECT_EQ(worker_->reads(), 3);
}

TEST_F(SchedulerLossTest, ARestoringRequestRestoresAgain) {
  const SymbolicWorkerOptions worker = {.disk_blocks = 100};
  Make(worker);
  Add(Spec(Prompt(200), 1));
  RunUntilIdle();
  Restart(worker);
  const SequenceId id = Add(Spec(Prompt(200), 10));
  ASSERT_TRUE(Step());
  ASSERT_EQ(scheduler_->stats().restoring, 1);
  EXPECT_EQ(Survive(worker), 0);
  RunUntilIdle();
  EXPECT_THAT(tokens_[id], SizeIs(10));
  EXPECT_EQ(worker_->reads(), 3);
  EXPECT_EQ(finished_.at(id).summary.usage().cached_tokens().disk(), 192u);
}

TEST_F(SchedulerLossTest, LogProbabilitiesOfAPromptAreToldOnce) {
  Make({.max_num_batched_tokens = 128});
  SequenceSpec spec = Spec(Prompt(500), 2);
  spec.wants_prompt_logprobs = true;
  const SequenceId id = Add(std::move(spec));
  ASSERT_TRUE(Step());
  ASSERT_TRUE(Step());
  PlanInVain();
  Survive({.max_num_batched_tokens = 128});
  RunUntilIdle();
  EXPECT_EQ(scores_[id], ExpectedScores(Prompt(500)));
}

TEST_F(SchedulerLossTest, AGroupThatWouldAnswerOtherwiseEndsThem) {
  Make({});
  const SequenceId id = Add(Spec(Prompt(100), 10));
  ASSERT_TRUE(Step());
  SchedulerOptions other = Options({});
  other.weights_hash = std::string(32, 'x');
  Survive({}, other);
  EXPECT_EQ(finished_.at(id).status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(scheduler_->stats().waiting, 0);
}

TEST_F(SchedulerLossTest, AGroupThatCannotHoldThemEndsThem) {
  Make({});
  const SequenceId id = Add(Spec(Prompt(500), 10));
  ASSERT_TRUE(Step());
  Survive({.host_blocks = 5});
  EXPECT_EQ(finished_.at(id).status.code(), absl::StatusCode::kResourceExhausted);
}

class SurvivorsTest : public SchedulerLossTest {
 protected:
  // Counts a loss; the next group takes over whoever is left. Returns those that ended.
  std::vector<SequenceId> LoseAndCount() {
    Survivors survivors = scheduler_->GiveUp();
    std::vector<SequenceId> ended;
    for (Event& event : survivors.CountLoss(absl::UnavailableError("killed"), now_)) {
      ended.push_back(std::get<FinishEvent>(event).id);
      Collect({std::move(event)});
    }
    Make({});
    Collect(scheduler_->TakeOver(std::move(survivors), now_));
    return ended;
  }
};

TEST_F(SurvivorsTest, ASequenceEndsAfterThreeLossesInWhichItGetsNoFurther) {
  Make({});
  const SequenceId id = Add(Spec(Prompt(5000), 10));
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(Step());
    ASSERT_TRUE(Step());  // the same again is no progress
    EXPECT_THAT(LoseAndCount(), IsEmpty());
  }
  PlanInVain();
  EXPECT_THAT(LoseAndCount(), ElementsAre(id));
  EXPECT_EQ(finished_.at(id).status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(finished_.at(id).summary.usage().prompt_tokens(), 5000u);
}

// Bug: a request with a long prompt ended, though each group had read more of it than the one
// before.
TEST_F(SurvivorsTest, TokensThatAClientBringsAreNoProgress) {
  Make({});
  SequenceSpec spec = Spec(Prompt(100), 10);
  spec.answer = Expected(spec);
  spec.answer.resize(3);
  const SequenceId id = Add(std::move(spec));
  for (int i = 0; i < 2; ++i) {
    PlanInVain();
    EXPECT_THAT(LoseAndCount(), IsEmpty()) << i;
  }
  PlanInVain();
  EXPECT_THAT(LoseAndCount(), ElementsAre(id));
}

TEST_F(SurvivorsTest, ReadingFurtherThanEverBeginsTheCountAgain) {
  Make({});
  const SequenceId id = Add(Spec(Prompt(5000), 10));
  for (int i = 1; i <= 8; ++i) {
    for (int n = 0; n < i; ++n) ASSERT_TRUE(Step());
    EXPECT_THAT(LoseAndCount(), IsEmpty());
  }
  RunUntilIdle();
  EXPECT_THAT(tokens_[id], SizeIs(10));
}

TEST_F(SurvivorsTest, ATokenBeginsTheCountAgain) {
  Make({});
  const SequenceId id = Add(Spec(Prompt(10), 100));
  for (size_t i = 1; i <= 5; ++i) {
    while (tokens_[id].size() < i) ASSERT_TRUE(Step());
    EXPECT_THAT(LoseAndCount(), IsEmpty());
    PlanInVain();
    EXPECT_THAT(LoseAndCount(), IsEmpty());
    PlanInVain();
    EXPECT_THAT(LoseAndCount(), IsEmpty());
  }
  RunUntilIdle();
  EXPECT_THAT(tokens_[id], SizeIs(100));
}

TEST_F(SurvivorsTest, WhoOnlyWaitedIsNotCounted) {
  Make({});
  for (int i = 0; i < 8; ++i) Add(Spec(Prompt(10, i + 1), 10));  // all slots
  const SequenceId waits = Add(Spec(Prompt(10, 9), 10));
  for (int i = 0; i < 3; ++i) {
    PlanInVain();
    const std::vector<SequenceId> ended = LoseAndCount();
    EXPECT_THAT(ended, SizeIs(i < 2 ? 0 : 8));
  }
  EXPECT_FALSE(finished_.contains(waits));
  RunUntilIdle();
  EXPECT_THAT(tokens_[waits], SizeIs(10));
}

TEST_F(SurvivorsTest, TheyCanBeCancelled) {
  Make({});
  const SequenceId first = Add(Spec(Prompt(10, 1), 10));
  const SequenceId second = Add(Spec(Prompt(20, 2), 10));
  ASSERT_TRUE(Step());
  Survivors survivors = scheduler_->GiveUp();
  EXPECT_EQ(survivors.stats().waiting, 2);
  EXPECT_EQ(survivors.stats().waiting_tokens, 30);
  Collect({*survivors.Cancel(first, absl::CancelledError("left"), now_)});
  EXPECT_FALSE(survivors.Cancel(first, absl::CancelledError("left"), now_).has_value());
  EXPECT_EQ(finished_.at(first).status, absl::CancelledError("left"));
  EXPECT_EQ(finished_.at(first).summary.usage().completion_tokens(), 1u);
  Collect(survivors.EndAll(absl::UnavailableError("end"), now_));
  EXPECT_EQ(finished_.at(second).status, absl::UnavailableError("end"));
  EXPECT_EQ(survivors.stats().waiting, 0);
}

}  // namespace
}  // namespace kvasir::coordinator
