// Plans that are made while another one is unanswered.
#include <deque>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "coordinator/scheduling/scheduler.h"
#include "tests/coordinator/scheduler_fixture.h"

namespace kvasir::coordinator {
namespace {

using ::testing::IsEmpty;
using ::testing::SizeIs;

class SchedulerAheadTest : public SchedulerTest {
 protected:
  // REQUIRES: there is something to plan.
  void Plan() {
    Scheduler::Planned planned = scheduler_->NextPlan(now_);
    Collect(std::move(planned.events));
    ASSERT_TRUE(planned.plan.has_value());
    plan_ = *planned.plan;
    absl::StatusOr<v1::StepReply> reply = worker_->Execute(plan_);
    ASSERT_TRUE(reply.ok()) << reply.status();
    replies_.push_back(*std::move(reply));
  }
  bool PlansNothing() { return !scheduler_->NextPlan(now_).plan.has_value(); }
  void Answer() {
    now_ += std::chrono::milliseconds(100);
    absl::StatusOr<std::vector<Event>> events = scheduler_->OnReply(replies_.front(), now_);
    ASSERT_TRUE(events.ok()) << events.status();
    replies_.pop_front();
    Collect(*std::move(events));
    ASSERT_EQ(scheduler_->CheckIntegrity(), absl::OkStatus());
  }
  // Every request has read its prompt, and nothing is unanswered.
  SequenceId AddAndRead(SequenceSpec spec) {
    const SequenceId id = Add(std::move(spec));
    EXPECT_TRUE(Step());
    return id;
  }

  std::deque<v1::StepReply> replies_;  // that the scheduler has not taken
};

TEST_F(SchedulerAheadTest, DamagedKvIsComputedAgainOnceBothPlansAreAnswered) {
  Make({});
  const SequenceSpec spec = Spec(Prompt(62), 9);
  const SequenceId id = AddAndRead(spec);
  Plan();
  Plan();
  for (v1::StepReply& reply : replies_) FailRow(0, absl::StatusCode::kDataLoss, reply);
  Answer();
  EXPECT_TRUE(PlansNothing());
  Answer();
  RunUntilIdle();
  EXPECT_EQ(tokens_.at(id), Expected(spec));
  EXPECT_EQ(scheduler_->stats().preempted_damage, 1);
}

TEST_F(SchedulerAheadTest, RowsFollowOnTokensThatAreNotKnown) {
  Make({});
  AddAndRead(Spec(Prompt(62), 9));
  Plan();
  EXPECT_EQ(plan_.rows(0).begin(), 62u);
  Plan();
  EXPECT_EQ(plan_.rows(0).begin(), 63u);
  EXPECT_TRUE(plan_.rows(0).sample());
  Answer();
  Plan();
  EXPECT_EQ(plan_.rows(0).begin(), 64u);
  EXPECT_THAT(plan_.rows(0).new_blocks(), SizeIs(1));
  EXPECT_THAT(plan_.seals(), IsEmpty());  // the row that fills the block is not answered
  Answer();
  Plan();
  EXPECT_THAT(plan_.seals(), SizeIs(1));
  EXPECT_EQ(scheduler_->stats().plans_ahead, 3);
}

TEST_F(SchedulerAheadTest, ARowBehindAnEndIsNobodys) {
  Make({});
  SequenceSpec spec = Spec(Prompt(62), 500);
  for (uint32_t stop : {3u, 8u, 11u}) spec.sampling.add_stop_token_ids(stop);
  const std::vector<int32_t> expected = Expected(spec);
  ASSERT_THAT(expected.size(), ::testing::AllOf(::testing::Gt(1u), ::testing::Lt(500u)));
  const SequenceId id = AddAndRead(std::move(spec));
  Plan();
  while (!finished_.contains(id)) {
    Plan();
    Answer();
  }
  EXPECT_EQ(tokens_[id], expected);
  const v1::Finish summary = finished_.at(id).summary;
  EXPECT_EQ(summary.usage().completion_tokens(), expected.size());
  EXPECT_EQ(scheduler_->unanswered_plans(), 1);
  Answer();
  EXPECT_EQ(scheduler_->stats().rows_in_vain, 1);
  RunUntilIdle();
  const auto whole = static_cast<int64_t>(62 + expected.size() - 1) / kvstore::kBlockTokens;
  EXPECT_EQ(worker_->num_blocks(), whole);  // full blocks of prompt and answer
  EXPECT_EQ(worker_->num_sequences(), 0);
}

TEST_F(SchedulerAheadTest, NothingIsPlannedBehindLastTokens) {
  Make({});
  AddAndRead(Spec(Prompt(10, 1), 2));
  Plan();
  EXPECT_TRUE(PlansNothing());
  Answer();
  EXPECT_EQ(scheduler_->stats().plans_ahead, 0);
  AddAndRead(Spec(Prompt(10, 2), 2));
  Add(Spec(Prompt(10, 3), 3));
  Plan();
  Answer();
  Plan();
  Plan();  // for the one that goes on
  EXPECT_THAT(plan_.rows(), SizeIs(1));
}

// A rank may miss blocks that the start names.
TEST_F(SchedulerAheadTest, NothingIsPlannedBehindAStart) {
  Make({});
  AddAndRead(Spec(Prompt(10, 1), 9));
  Add(Spec(Prompt(10, 2), 9));
  Plan();
  ASSERT_THAT(plan_.starts(), SizeIs(1));
  EXPECT_TRUE(PlansNothing());
  Answer();
  Plan();
  Add(Spec(Prompt(10, 3), 9));
  Plan();  // the start itself may be ahead
  EXPECT_THAT(plan_.starts(), SizeIs(1));
  EXPECT_EQ(scheduler_->stats().plans_ahead, 1);
}

TEST_F(SchedulerAheadTest, WhoWaitsSharesWhatIsBeingRead) {
  Make({.max_num_batched_tokens = 128});
  const std::vector<int32_t> document = Prompt(300);
  Add(Spec(document, 9));
  Plan();
  Answer();
  Plan();  // [128, 256)
  Add(Spec(document, 9));
  EXPECT_TRUE(PlansNothing());
  Answer();
  Plan();
  ASSERT_THAT(plan_.starts(), SizeIs(1));
  EXPECT_THAT(plan_.starts(0).cached_blocks(), SizeIs(4));
}

TEST_F(SchedulerAheadTest, ChunksFollowChunks) {
  Make({.max_num_batched_tokens = 128});
  Add(Spec(Prompt(600), 2));
  Plan();
  Answer();
  Plan();
  Plan();
  EXPECT_EQ(plan_.rows(0).begin(), 256u);
  EXPECT_EQ(plan_.rows(0).num_tokens(), 128u);
}

TEST_F(SchedulerAheadTest, NoBlockIsTakenFromAnother) {
  Make({.host_blocks = 3});
  AddAndRead(Spec(Prompt(63, 1), 90));
  AddAndRead(Spec(Prompt(60, 2), 60));
  Plan();
  Plan();  // the first enters its second block
  for (int i = 0; i < 2; ++i) {
    Answer();
    Plan();
  }
  Answer();  // the second one's first block is full now, and no third one is free
  EXPECT_TRUE(PlansNothing());
  EXPECT_EQ(scheduler_->stats().preempted_recompute, 0);
  Answer();
  Plan();
  EXPECT_EQ(scheduler_->stats().preempted_recompute, 1);
  EXPECT_THAT(plan_.free_slots(), SizeIs(1));
}

TEST_F(SchedulerAheadTest, UnsealedBlocksStayWithinTheDevicesShare) {
  Make({.device_blocks = 3});  // a share of two
  AddAndRead(Spec(Prompt(62, 1), 9));
  AddAndRead(Spec(Prompt(10, 2), 9));
  Plan();  // fills the first one's block
  EXPECT_TRUE(PlansNothing());
  Answer();
  Plan();
  EXPECT_THAT(plan_.seals(), SizeIs(1));
}

TEST_F(SchedulerAheadTest, ACancelledRequestLeavesBehindItsRows) {
  Make({});
  const SequenceId id = AddAndRead(Spec(Prompt(10, 1), 90));
  AddAndRead(Spec(Prompt(10, 2), 90));
  Plan();
  Plan();
  ASSERT_TRUE(scheduler_->Cancel(id, absl::CancelledError(""), now_).has_value());
  Answer();
  Plan();
  EXPECT_THAT(plan_.free_slots(), SizeIs(1));
  EXPECT_THAT(plan_.rows(), SizeIs(1));
  Answer();
  Answer();
  EXPECT_EQ(scheduler_->stats().rows_in_vain, 2);
}

}  // namespace
}  // namespace kvasir::coordinator
