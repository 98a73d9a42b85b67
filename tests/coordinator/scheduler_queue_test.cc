// Which requests wait, for how long, and which are refused.
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "coordinator/scheduling/scheduler.h"
#include "proto/grpc_status.h"
#include "tests/coordinator/scheduler_fixture.h"

namespace kvasir::coordinator {
namespace {

using ::testing::HasSubstr;
using ::testing::SizeIs;

TEST_F(SchedulerTest, ARequestThatCanNeverFitIsRefusedWithNumbers) {
  Make({.host_blocks = 4});
  EXPECT_EQ(scheduler_->Add(Spec(Prompt(200), 57)), absl::OkStatus());  // 256 tokens need KV
  const absl::Status status = scheduler_->Add(Spec(Prompt(200), 58));
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("need 5 blocks"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("holds 4"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("--kv-host-size-gb"));
}

TEST_F(SchedulerTest, WaitsUntilThereAreBlocksForThePromptAndOneMore) {
  Make({.host_blocks = 6});
  Add(Spec(Prompt(100, 1), 1));  // 2 blocks each
  Add(Spec(Prompt(100, 2), 1));
  const SequenceId third = Add(Spec(Prompt(100, 3), 1));
  ASSERT_TRUE(Step());
  EXPECT_EQ(scheduler_->stats().running, 0);  // both have ended
  EXPECT_EQ(scheduler_->stats().waiting, 1);
  RunUntilIdle();
  EXPECT_THAT(tokens_[third], SizeIs(1));
  EXPECT_EQ(scheduler_->stats().preempted_recompute, 0);
}

TEST_F(SchedulerTest, TheQueueIsBounded) {
  SchedulerOptions options = Options({.max_num_seqs = 2});
  options.max_queue_len = 1;
  Make({.max_num_seqs = 2}, options);
  for (int i = 0; i < 3; ++i) Add(Spec(Prompt(10, i + 1), 4));  // two can start, one waits
  EXPECT_EQ(scheduler_->Add(Spec(Prompt(10), 4)).code(), absl::StatusCode::kResourceExhausted);
  ASSERT_TRUE(Step());
  EXPECT_EQ(scheduler_->Add(Spec(Prompt(10), 4)).code(), absl::StatusCode::kResourceExhausted);
  RunUntilIdle();
  EXPECT_THAT(finished_, SizeIs(3));
}

TEST_F(SchedulerTest, TokensOfAResumedAnswerCountInTheQueue) {
  SchedulerOptions options = Options({.max_num_seqs = 1});
  options.max_queued_tokens = 500;
  Make({.max_num_seqs = 1}, options);
  Add(Spec(Prompt(100, 1), 4));
  ASSERT_TRUE(Step());
  Add(Spec(Prompt(100, 2), 4));
  SequenceSpec resumed = Spec(Prompt(10, 3), 500);
  resumed.answer = Prompt(450, 3);
  const absl::Status status = scheduler_->Add(resumed);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("this one has 460"));
  resumed.answer.resize(200);
  ASSERT_TRUE(scheduler_->Add(resumed).ok());
  EXPECT_EQ(scheduler_->stats().waiting_tokens, 310);
}

TEST_F(SchedulerTest, TheTokensOfTheQueueAreBoundedButOneMayWaitWhateverItsLength) {
  SchedulerOptions options = Options({.max_num_seqs = 1});
  options.max_queued_tokens = 500;
  Make({.max_num_seqs = 1}, options);
  Add(Spec(Prompt(100, 1), 4));
  ASSERT_TRUE(Step());
  Add(Spec(Prompt(600, 2), 4));  // alone in the queue
  EXPECT_EQ(scheduler_->stats().waiting_tokens, 600);
  const absl::Status status = scheduler_->Add(Spec(Prompt(1), 4));
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("600 prompt tokens wait"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("--max-queued-tokens"));
  RunUntilIdle();
  EXPECT_EQ(scheduler_->stats().waiting_tokens, 0);
  Add(Spec(Prompt(100, 3), 4));
  ASSERT_TRUE(Step());
  Add(Spec(Prompt(200, 4), 4));
  Add(Spec(Prompt(300, 5), 4));  // exactly 500
  EXPECT_EQ(scheduler_->Add(Spec(Prompt(1), 4)).code(), absl::StatusCode::kResourceExhausted);
  RunUntilIdle();
  EXPECT_THAT(finished_, SizeIs(5));
}

TEST_F(SchedulerTest, OnlyWhatTimeMendsTellsWhenToTryAgain) {
  SchedulerOptions options = Options({.host_blocks = 10, .max_num_seqs = 1});
  options.max_queue_len = 0;
  Make({.host_blocks = 10, .max_num_seqs = 1}, options);
  EXPECT_EQ(proto::RetryDelay(scheduler_->Add(Spec(Prompt(700), 4))), std::nullopt);
  Add(Spec(Prompt(100), 4));
  EXPECT_EQ(proto::RetryDelay(scheduler_->Add(Spec(Prompt(100), 4))), absl::Seconds(1));
}

TEST(SchedulerOptionsTest, OptionsThatRunNothingAreRefused) {
  SchedulerOptions options = Options({});
  options.device_blocks = 0;
  EXPECT_EQ(Scheduler::Create(options, kvstore::PrefixIndex::Create(4)).status().code(),
            absl::StatusCode::kInvalidArgument);
  options = Options({});
  options.max_num_batched_tokens = 100;
  EXPECT_EQ(Scheduler::Create(options, kvstore::PrefixIndex::Create(4)).status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace kvasir::coordinator
