// What happens when answers grow beyond the blocks there are.
#include <algorithm>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "coordinator/scheduling/scheduler.h"
#include "tests/coordinator/scheduler_fixture.h"

namespace kvasir::coordinator {
namespace {

using ::testing::IsEmpty;
using ::testing::SizeIs;

class SchedulerPreemptionTest : public SchedulerTest {
 protected:
  // Adds two requests whose answers do not fit together: each needs 4 of the 6 (or 7) blocks.
  void AddTwo(const ResolvedPolicy& policy = DensePolicy()) {
    for (int32_t i : {1, 2}) {
      SequenceSpec spec = Spec(Prompt(100, i), 150);
      spec.policy = policy;
      expected_.push_back(Expected(spec));
      ids_.push_back(Add(std::move(spec)));
    }
  }
  void ExpectAnswers() {
    for (size_t i = 0; i < ids_.size(); ++i) {
      EXPECT_EQ(tokens_[ids_[i]], expected_[i]) << i;  // Collect checks the indices
      EXPECT_EQ(finished_.at(ids_[i]).status, absl::OkStatus());
    }
  }

  std::vector<SequenceId> ids_;
  std::vector<std::vector<int32_t>> expected_;
};

TEST_F(SchedulerPreemptionTest, TheYoungestGivesWayAndIsAnsweredTheSame) {
  Make({.host_blocks = 6});
  AddTwo();
  while (scheduler_->stats().preempted_recompute == 0) ASSERT_TRUE(Step());
  EXPECT_EQ(scheduler_->stats().running, 1);
  EXPECT_EQ(scheduler_->stats().waiting, 1);
  EXPECT_THAT(plan_.free_slots(), SizeIs(1));
  EXPECT_THAT(plan_.rows(), SizeIs(1));
  while (!finished_.contains(ids_[0])) ASSERT_TRUE(Step());
  EXPECT_FALSE(finished_.contains(ids_[1]));
  RunUntilIdle();
  ExpectAnswers();
  EXPECT_EQ(scheduler_->stats().preempted_swap, 0);
  const v1::Usage& usage = finished_.at(ids_[1]).summary.usage();
  EXPECT_EQ(usage.prompt_tokens(), 100u);
  EXPECT_EQ(usage.completion_tokens(), 150u);
  EXPECT_EQ(usage.cached_tokens().device(), 0u);
  EXPECT_EQ(scheduler_->stats().prefix_queries, 200);
}

TEST_F(SchedulerPreemptionTest, WhatWasGeneratedIsReadAgainInOneRowAndNotSampled) {
  SchedulerOptions options = Options({.host_blocks = 6});
  options.enable_prefix_caching = false;
  Make({.host_blocks = 6}, options);
  AddTwo();
  while (!finished_.contains(ids_[0])) ASSERT_TRUE(Step());
  const size_t had = tokens_[ids_[1]].size();
  ASSERT_GT(had, 64u);
  while (plan_.starts().empty()) ASSERT_TRUE(Step());
  EXPECT_EQ(plan_.starts(0).num_prompt_tokens(), 100u);
  EXPECT_THAT(plan_.starts(0).tokens(), SizeIs(100 + had));
  EXPECT_EQ(plan_.rows(0).num_tokens(), 100 + had);
  EXPECT_EQ(tokens_[ids_[1]].size(), had + 1);
  EXPECT_EQ(scheduler_->stats().resumed_recompute, 1);
  RunUntilIdle();
  ExpectAnswers();
}

TEST_F(SchedulerPreemptionTest, BlocksThatAreLeftAreFoundAgainInMemory) {
  Make({.host_blocks = 7});
  AddTwo(SparsePolicy(64));  // so that the blocks of the answer are its own
  RunUntilIdle();
  ExpectAnswers();
  EXPECT_GT(scheduler_->stats().preempted_recompute, 0);
  EXPECT_GT(scheduler_->stats().resumed_host, 0);
}

TEST_F(SchedulerPreemptionTest, BlocksComeBackFromDisk) {
  Make({.host_blocks = 6, .disk_blocks = 100});
  AddTwo(SparsePolicy(64));
  RunUntilIdle();
  ExpectAnswers();
  EXPECT_GT(scheduler_->stats().preempted_swap, 0);
  EXPECT_EQ(scheduler_->stats().preempted_recompute, 0);
  EXPECT_GT(scheduler_->stats().resumed_disk, 0);
  EXPECT_GT(worker_->reads(), 0);
}

TEST_F(SchedulerPreemptionTest, OwnBlocksAreNotFoundByOthers) {
  Make({.host_blocks = 7});
  AddTwo(SparsePolicy(64));
  while (scheduler_->stats().preempted_recompute == 0) ASSERT_TRUE(Step());
  std::vector<int32_t> turn = Prompt(100, 2);
  turn.insert(turn.end(), tokens_[ids_[1]].begin(), tokens_[ids_[1]].end());
  turn.push_back(1);
  SequenceSpec spec = Spec(turn, 1);  // dense: it would read the answer block by block
  const std::vector<int32_t> expected = Expected(spec);
  const SequenceId id = Add(std::move(spec));
  RunUntilIdle();  // the rank refuses blocks that are not this prefix
  EXPECT_EQ(tokens_[id], expected);
  ExpectAnswers();
}

// Tokens and policies are equal. The position from which on tokens are read one by one is not.
TEST_F(SchedulerPreemptionTest, OwnBlocksAreOnlyForPromptsOfTheSameLength) {
  Make({.host_blocks = 10, .disk_blocks = 100});
  const SequenceId oldest = Add(Spec(Prompt(100, 1), 500));
  SequenceSpec spec = Spec(Prompt(100, 2), 400);
  spec.policy = SparsePolicy(64);
  const SequenceId first = Add(spec);
  while (scheduler_->stats().preempted_swap == 0) ASSERT_TRUE(Step());
  DeliverTierReport();
  ASSERT_TRUE(scheduler_->Cancel(first, absl::CancelledError(""), now_).has_value());
  spec.id = SequenceId(next_id_++);
  spec.prompt.insert(spec.prompt.end(), tokens_[first].begin(), tokens_[first].begin() + 20);
  const std::vector<int32_t> expected = Expected(spec);
  const SequenceId second = Add(spec);
  while (scheduler_->stats().preempted_swap == 1) ASSERT_TRUE(Step());
  EXPECT_FALSE(finished_.contains(oldest));
  RunUntilIdle();  // the rank refuses blocks that are not this prefix
  EXPECT_EQ(tokens_[second], expected);
  EXPECT_GT(scheduler_->stats().resumed_disk, 0);
}

TEST_F(SchedulerPreemptionTest, WithAWindowBelowAPageTheAnswerIsReadOneByOne) {
  SchedulerOptions options = Options({.host_blocks = 6});
  options.enable_prefix_caching = false;
  Make({.host_blocks = 6}, options);
  ResolvedPolicy policy = SparsePolicy(0);
  policy.decode.set_window_tokens(32);
  AddTwo(policy);
  while (!finished_.contains(ids_[0])) ASSERT_TRUE(Step());
  while (plan_.starts().empty()) ASSERT_TRUE(Step());
  ASSERT_GT(plan_.starts(0).tokens_size(), 100);
  EXPECT_LE(plan_.rows(0).begin() + plan_.rows(0).num_tokens(), 100u);
  ASSERT_TRUE(Step());
  EXPECT_EQ(plan_.rows(0).num_tokens(), 1u);
  EXPECT_FALSE(plan_.rows(0).sample());
  RunUntilIdle();
  ExpectAnswers();
}

TEST_F(SchedulerPreemptionTest, APromptThatIsBeingReadGivesWayAndItsProgressNeverFalls) {
  SchedulerOptions options = Options({.host_blocks = 48, .max_num_batched_tokens = 128});
  options.enable_prefix_caching = false;  // so that it begins again from the start
  Make({.host_blocks = 48, .max_num_batched_tokens = 128}, options);
  for (int32_t i = 0; i < 3; ++i) Add(Spec(Prompt(60 + 20 * i, i + 1), 300));
  for (int i = 0; i < 30; ++i) ASSERT_TRUE(Step());
  const SequenceId long_one = Add(Spec(Prompt(2560, 9), 3));  // 40 blocks in as many steps
  while (scheduler_->stats().preempted_recompute == 0) ASSERT_TRUE(Step());
  EXPECT_GT(progress_[long_one].back().processed_tokens, 1000);
  EXPECT_THAT(tokens_[long_one], IsEmpty());
  RunUntilIdle();
  EXPECT_THAT(tokens_[long_one], SizeIs(3));
  std::vector<int64_t> processed;
  for (const ProgressEvent& event : progress_[long_one])
    processed.push_back(event.processed_tokens);
  EXPECT_TRUE(std::is_sorted(processed.begin(), processed.end()));
  EXPECT_EQ(processed.back(), 2560);
}

TEST_F(SchedulerPreemptionTest, ARestoringRequestGivesWay) {
  const SymbolicWorkerOptions options = {.host_blocks = 7, .disk_blocks = 100};
  Make(options);
  Add(Spec(Prompt(200, 1), 1));
  RunUntilIdle();
  SchedulerOptions patient = Options(options);
  patient.restore_patience = absl::Hours(1);
  Restart(options, patient);
  const SequenceId runs = Add(Spec(Prompt(60, 2), 300));
  ASSERT_TRUE(Step());
  const SequenceId restores = Add(Spec(Prompt(200, 1), 2));
  ASSERT_TRUE(Step());
  ASSERT_EQ(scheduler_->stats().restoring, 1);
  while (scheduler_->stats().restoring == 1) ASSERT_TRUE(Step());  // the disk is silent
  EXPECT_FALSE(finished_.contains(runs));
  EXPECT_EQ(scheduler_->stats().waiting, 1);
  RunUntilIdle();
  EXPECT_THAT(tokens_[runs], SizeIs(300));
  EXPECT_THAT(tokens_[restores], SizeIs(2));
}

TEST_F(SchedulerPreemptionTest, CancellingAPreemptedRequestLeavesNothing) {
  Make({.host_blocks = 6});
  AddTwo();
  while (scheduler_->stats().preempted_recompute == 0) ASSERT_TRUE(Step());
  ASSERT_TRUE(scheduler_->Cancel(ids_[1], absl::CancelledError(""), now_).has_value());
  RunUntilIdle();
  EXPECT_EQ(tokens_[ids_[0]], expected_[0]);
  EXPECT_EQ(worker_->num_sequences(), 0);
  EXPECT_EQ(scheduler_->stats().index.held_blocks, 0);
}

}  // namespace
}  // namespace kvasir::coordinator
