// Prompts that another server reads: their blocks are fetched from peers while it reads.
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "coordinator/scheduling/scheduler.h"
#include "tests/coordinator/scheduler_fixture.h"

namespace kvasir::coordinator {
namespace {

using ::testing::IsEmpty;
using ::testing::SizeIs;
using Elsewhere = Scheduler::Elsewhere;

constexpr SymbolicWorkerOptions kReader = {.disk_blocks = 100};
constexpr SymbolicWorkerOptions kWithPeers = {.has_peers = true};

class SchedulerElsewhereTest : public SchedulerTest {
 protected:
  void SetUp() override { Make(kWithPeers); }

  // The ranks of a server that has read and sealed the first `blocks` blocks of the prompt are
  // asked from now on.
  void ReadThere(int64_t blocks) {
    std::unique_ptr<SymbolicWorker> worker = std::move(worker_);
    std::unique_ptr<Scheduler> scheduler = std::move(scheduler_);
    Make(kReader);
    Add(Spec({prompt_.begin(), prompt_.begin() + 64 * blocks + 1}, 1));
    RunUntilIdle();
    worker->AskPeer(*worker_);
    worker_ = std::move(worker);
    scheduler_ = std::move(scheduler);
  }
  SequenceId Begin() {
    SequenceSpec spec = Spec(prompt_, 5);
    spec.is_read_elsewhere = true;
    expected_ = Expected(spec);
    return Add(std::move(spec));
  }
  // The other server tells of this many sealed blocks. The next plan asks for `asked`.
  void Tell(SequenceId id, int64_t blocks, int asked) {
    scheduler_->ReadElsewhere(id, 64 * blocks);
    ASSERT_EQ(Step(), asked > 0);
    if (asked == 0) return;
    EXPECT_THAT(plan_.restores(), SizeIs(asked));
    EXPECT_THAT(plan_.rows(), IsEmpty());
  }
  SequenceId BeginAndFetchHalf() {
    const SequenceId id = Begin();
    ReadThere(6);
    Tell(id, 6, 6);
    DeliverTierReport();
    return id;
  }
  // The next plan drops as many blocks, which did not come, and no more. It takes no time.
  void DropAbsent(int blocks) {
    ASSERT_TRUE(Step());
    now_ -= std::chrono::milliseconds(100);
    EXPECT_THAT(plan_.drop_blocks(), SizeIs(blocks));
    EXPECT_THAT(plan_.restores(), IsEmpty());
    EXPECT_THAT(plan_.rows(), IsEmpty());
    EXPECT_FALSE(Step());
  }

  const std::vector<int32_t> prompt_ = Prompt(64 * 12 + 10, 5);
  std::vector<int32_t> expected_;
};

TEST_F(SchedulerElsewhereTest, BlocksAreFetchedWhileThePromptIsRead) {
  const SequenceId id = Begin();
  EXPECT_FALSE(Step());  // nothing is read yet
  ReadThere(5);
  Tell(id, 5, 5);
  EXPECT_GT(scheduler_->stats().index.held_blocks, 0);
  DeliverTierReport();
  EXPECT_EQ(worker_->reads(), 5);
  EXPECT_FALSE(Step());  // it holds them, and waits to be told of more
  Tell(id, 5, 0);
  ReadThere(12);
  Tell(id, 11, 6);
  DeliverTierReport();
  now_ += std::chrono::seconds(90);  // nobody is late: the prompt is not read further
  EXPECT_FALSE(Step());
  EXPECT_EQ(scheduler_->stats().read_elsewhere, 1);
  EXPECT_EQ(scheduler_->stats().restoring, 0);
  scheduler_->EndReadElsewhere(id, Elsewhere::kRead, now_);
  ASSERT_TRUE(Step());
  EXPECT_EQ(scheduler_->stats().read_elsewhere, 0);
  EXPECT_EQ(scheduler_->stats().restoring, 1);
  EXPECT_THAT(plan_.restores(), SizeIs(1));
  EXPECT_GT(scheduler_->NextDeadline().value(), now_);
  DeliverTierReport();
  ASSERT_TRUE(Step());
  EXPECT_THAT(plan_.starts(0).cached_blocks(), SizeIs(12));
  RunUntilIdle();
  EXPECT_EQ(tokens_[id], expected_);
  const v1::Finish& summary = finished_.at(id).summary;
  EXPECT_EQ(summary.usage().cached_tokens().peer(), 768u);
  EXPECT_EQ(summary.timing().restore().seconds(), 0);  // it waited for the reader, not for blocks
  EXPECT_GE(summary.timing().queue().seconds(), 90);
  EXPECT_FALSE(scheduler_->stats().peers_set_aside);
}

TEST_F(SchedulerElsewhereTest, WhileNothingIsReadItHoldsNothingAndStandsInNobodysWay) {
  SymbolicWorkerOptions small = kWithPeers;
  small.max_num_seqs = 1;
  SchedulerOptions options = Options(small);
  options.max_queue_len = 0;
  Make(small, options);
  const SequenceId id = Begin();
  EXPECT_FALSE(Step());
  EXPECT_EQ(scheduler_->stats().read_elsewhere, 1);
  EXPECT_EQ(scheduler_->stats().waiting, 0);
  EXPECT_EQ(scheduler_->stats().index.held_blocks, 0);
  const SequenceId other = Add(Spec(Prompt(100), 3));  // there is no queue, and a slot for it
  RunUntilIdle();
  EXPECT_TRUE(finished_.contains(other));
  EXPECT_FALSE(finished_.contains(id));
  scheduler_->EndReadElsewhere(id, Elsewhere::kFailed, now_);
  RunUntilIdle();
  EXPECT_EQ(tokens_[id], expected_);
}

TEST_F(SchedulerElsewhereTest, AbsentBlocksAreAskedForWithTheNextOnesAndNotBefore) {
  const SequenceId id = Begin();
  ReadThere(4);
  Tell(id, 8, 8);
  DeliverTierReport();
  EXPECT_EQ(worker_->reads(), 4);
  ReadThere(9);
  DropAbsent(4);
  EXPECT_EQ(scheduler_->NextDeadline(), std::nullopt);
  Tell(id, 9, 5);
  DeliverTierReport();
  EXPECT_EQ(worker_->reads(), 9);
}

// Computing them would be faster, and would hold up streams.
TEST_F(SchedulerElsewhereTest, SlowBlocksAreStillFetched) {
  SymbolicWorkerOptions owner = kReader, asker = kWithPeers;
  owner.disk_blocks = owner.host_blocks = asker.host_blocks = 1000;
  Make(asker);
  Add(Spec(Prompt(64 * 3, 9), 1));  // from now on it is known how fast prompts are read
  RunUntilIdle();
  SequenceSpec spec = Spec(Prompt(64 * 200 + 10, 5), 1);
  spec.is_read_elsewhere = true;
  const std::vector<int32_t> prompt = spec.prompt;
  const SequenceId id = Add(std::move(spec));
  std::unique_ptr<SymbolicWorker> worker = std::move(worker_);
  std::unique_ptr<Scheduler> scheduler = std::move(scheduler_);
  Make(owner);
  Add(Spec(prompt, 1));
  RunUntilIdle();
  worker->AskPeer(*worker_);
  worker_ = std::move(worker);
  scheduler_ = std::move(scheduler);

  Tell(id, 64, 64);
  now_ += std::chrono::seconds(9);
  DeliverTierReport();
  EXPECT_FALSE(scheduler_->stats().peers_set_aside);
  Tell(id, 200, 136);
  now_ += std::chrono::seconds(9);
  DeliverTierReport();
  scheduler_->EndReadElsewhere(id, Elsewhere::kRead, now_);
  RunUntilIdle();
  EXPECT_EQ(finished_.at(id).summary.usage().cached_tokens().peer(), 64 * 200u);
  EXPECT_FALSE(scheduler_->stats().peers_set_aside);
}

// The reader tells of its end before its ranks seal what the last step read.
TEST_F(SchedulerElsewhereTest, TheLastBlocksAreAskedForAgainUntilTheyAreSealed) {
  const SequenceId id = BeginAndFetchHalf();
  scheduler_->EndReadElsewhere(id, Elsewhere::kRead, now_);
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(Step());
    now_ -= std::chrono::milliseconds(100);  // the step took no time
    EXPECT_THAT(plan_.restores(), SizeIs(6));
    DeliverTierReport();
    DropAbsent(6);
    const TimePoint again = scheduler_->NextDeadline().value();
    EXPECT_EQ(again, now_ + std::chrono::milliseconds(5));
    now_ = again;
  }
  ReadThere(12);
  ASSERT_TRUE(Step());
  DeliverTierReport();
  ASSERT_TRUE(Step());
  EXPECT_THAT(plan_.starts(0).cached_blocks(), SizeIs(12));
  RunUntilIdle();
  EXPECT_EQ(tokens_[id], expected_);
}

TEST_F(SchedulerElsewhereTest, WhatIsNotSealedInTimeIsComputed) {
  const SequenceId id = BeginAndFetchHalf();
  scheduler_->EndReadElsewhere(id, Elsewhere::kRead, now_);
  ASSERT_TRUE(Step());  // which takes as long as blocks are waited for
  EXPECT_THAT(plan_.restores(), SizeIs(6));
  DeliverTierReport();
  ASSERT_TRUE(Step());
  EXPECT_EQ(plan_.rows(0).begin(), 64 * 6u);
  RunUntilIdle();
  EXPECT_EQ(tokens_[id], expected_);
  EXPECT_FALSE(scheduler_->stats().peers_set_aside);
}

TEST_F(SchedulerElsewhereTest, WhenTheReaderFailsThePromptIsReadOnHere) {
  const SequenceId id = BeginAndFetchHalf();
  scheduler_->EndReadElsewhere(id, Elsewhere::kFailed, now_);
  ASSERT_TRUE(Step());  // perhaps it had sealed more
  now_ -= std::chrono::milliseconds(100);
  EXPECT_THAT(plan_.restores(), SizeIs(6));
  DeliverTierReport();
  ASSERT_TRUE(Step());
  EXPECT_THAT(plan_.starts(0).cached_blocks(), SizeIs(6));
  EXPECT_EQ(plan_.rows(0).begin(), 64 * 6u);
  RunUntilIdle();
  EXPECT_EQ(tokens_[id], expected_);
}

TEST_F(SchedulerElsewhereTest, APeerThatFailsIsNotAskedWhenMoreIsRead) {
  const SequenceId id = Begin();
  ReadThere(12);
  worker_->FailReads(1, /*sound=*/3);
  Tell(id, 6, 6);
  DeliverTierReport();
  EXPECT_TRUE(scheduler_->stats().peers_set_aside);
  DropAbsent(3);
  Tell(id, 9, 0);
  scheduler_->EndReadElsewhere(id, Elsewhere::kRead, now_);
  ASSERT_TRUE(Step());
  EXPECT_EQ(plan_.rows(0).begin(), 64 * 3u);
  RunUntilIdle();
  EXPECT_EQ(tokens_[id], expected_);
}

// A server that does not tell what it has sealed is asked once it has read the prompt.
TEST_F(SchedulerElsewhereTest, AnOldReaderIsAskedForEverythingAtItsEnd) {
  const SequenceId id = Begin();
  ReadThere(12);
  Tell(id, 0, 0);
  scheduler_->EndReadElsewhere(id, Elsewhere::kRead, now_);
  ASSERT_TRUE(Step());
  EXPECT_THAT(plan_.restores(), SizeIs(12));
  RunUntilIdle();
  EXPECT_EQ(tokens_[id], expected_);
  EXPECT_EQ(finished_.at(id).summary.usage().cached_tokens().peer(), 768u);
}

TEST_F(SchedulerElsewhereTest, ALiarIsTakenAtItsWordForThePromptAlone) {
  const SequenceId id = Begin();
  Tell(id, int64_t{1} << 25, 12);
  DeliverTierReport();
  DropAbsent(12);
  scheduler_->EndReadElsewhere(id, Elsewhere::kFailed, now_);
  RunUntilIdle();
  EXPECT_EQ(tokens_[id], expected_);
}

// Running requests need its room: it gives up its blocks, which others may find.
TEST_F(SchedulerElsewhereTest, ItGivesWayAndAsksAgainWhenThereIsRoom) {
  SymbolicWorkerOptions small = kWithPeers;
  small.host_blocks = 18;
  Make(small);
  const SequenceId other = Add(Spec(Prompt(64 * 3, 9), 64 * 6));
  ASSERT_TRUE(Step());
  const SequenceId id = Begin();
  ReadThere(12);
  const auto held = [this] { return scheduler_->stats().index.held_blocks; };
  scheduler_->ReadElsewhere(id, 64 * 6);
  ASSERT_TRUE(Step());
  EXPECT_THAT(plan_.restores(), SizeIs(6));
  const int64_t before = held();
  while (held() >= before) {
    DeliverTierReport();
    ASSERT_TRUE(Step());
  }
  EXPECT_FALSE(finished_.contains(other));
  EXPECT_EQ(scheduler_->stats().waiting, 0);
  EXPECT_EQ(scheduler_->stats().read_elsewhere, 1);
  scheduler_->ReadElsewhere(id, 64 * 9);  // there is no room
  ASSERT_TRUE(Step());
  EXPECT_THAT(plan_.restores(), IsEmpty());
  RunUntilIdle();
  EXPECT_TRUE(finished_.contains(other));
  EXPECT_EQ(held(), 0);
  scheduler_->ReadElsewhere(id, 64 * 11);
  ASSERT_TRUE(Step());
  EXPECT_EQ(plan_.restores_size(), 5);  // after those that it had, and others may find
  scheduler_->EndReadElsewhere(id, Elsewhere::kRead, now_);
  RunUntilIdle();
  EXPECT_EQ(tokens_[id], expected_);
}

TEST_F(SchedulerElsewhereTest, WithTheGroupItForgetsTheReader) {
  const SequenceId id = Begin();
  ReadThere(6);
  Tell(id, 6, 6);
  const SequenceId second = Begin();
  EXPECT_EQ(Survive(kWithPeers), 0);
  scheduler_->ReadElsewhere(id, 64 * 9);  // comes late
  RunUntilIdle();
  EXPECT_EQ(tokens_[id], expected_);
  EXPECT_EQ(tokens_[second], expected_);
}

TEST_F(SchedulerElsewhereTest, CancelledItLeavesNothing) {
  const SequenceId id = Begin();
  const SequenceId second = Begin();
  ReadThere(6);
  Tell(id, 6, 6);
  for (const SequenceId each : {id, second}) {
    EXPECT_TRUE(scheduler_->Cancel(each, absl::CancelledError(""), now_).has_value());
    EXPECT_EQ(scheduler_->CheckIntegrity(), absl::OkStatus());
  }
  scheduler_->EndReadElsewhere(id, Elsewhere::kFailed, now_);
  RunUntilIdle();
  EXPECT_EQ(scheduler_->stats().index.held_blocks, 0);
  EXPECT_EQ(scheduler_->stats().read_elsewhere, 0);
}

// What the ranks seal with the next plan is told as sealed when that plan is out.
TEST_F(SchedulerElsewhereTest, AReaderTellsWhatSentPlansSeal) {
  const SequenceId id = Add(Spec(Prompt(64 * 20 + 10), 1));
  RunUntilIdle();
  std::vector<std::pair<int64_t, int64_t>> told;  // processed, sealed
  for (const ProgressEvent& event : progress_[id]) {
    told.emplace_back(event.processed_tokens / 64, event.sealed_tokens / 64);
  }
  using Pair = std::pair<int64_t, int64_t>;
  EXPECT_THAT(told, ::testing::ElementsAre(Pair(0, 0), Pair(8, 0), Pair(16, 8), Pair(20, 16)));
}

}  // namespace
}  // namespace kvasir::coordinator
