// Blocks that come back from disk, or do not.
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "coordinator/scheduling/scheduler.h"
#include "tests/coordinator/scheduler_fixture.h"

namespace kvasir::coordinator {
namespace {

using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr SymbolicWorkerOptions kWithDisk = {.disk_blocks = 100};

class SchedulerDiskTest : public SchedulerTest {
 protected:
  // A prompt of four full blocks is on disk and nowhere else.
  void SetUp() override {
    Make(kWithDisk);
    Add(Spec(prompt_, 1));
    RunUntilIdle();
    ASSERT_EQ(worker_->num_stored(), 4);
    Restart(kWithDisk);
    ASSERT_EQ(scheduler_->stats().stored.blocks, 4);
    ASSERT_EQ(worker_->num_blocks(), 0);
  }
  // Starts to restore for one request.
  SequenceId Begin(int64_t max_tokens) {
    SequenceSpec spec = Spec(prompt_, max_tokens);
    expected_ = Expected(spec);
    const SequenceId id = Add(std::move(spec));
    EXPECT_TRUE(Step());
    EXPECT_THAT(plan_.restores(), SizeIs(4));
    EXPECT_THAT(plan_.rows(), IsEmpty());
    EXPECT_EQ(scheduler_->stats().restoring, 1);
    return id;
  }

  const std::vector<int32_t> prompt_ = Prompt(300);
  std::vector<int32_t> expected_;
};

TEST_F(SchedulerDiskTest, APromptIsFoundOnDiskAfterARestart) {
  const SequenceId id = Begin(5);
  EXPECT_FALSE(Step());  // nothing to do but wait
  DeliverTierReport();
  ASSERT_TRUE(Step());
  EXPECT_THAT(plan_.starts(0).cached_blocks(), SizeIs(4));
  EXPECT_EQ(plan_.rows(0).begin(), 256u);
  RunUntilIdle();
  EXPECT_EQ(tokens_[id], expected_);
  EXPECT_EQ(worker_->reads(), 4);
  EXPECT_EQ(scheduler_->stats().prefix_hits, 256);
  EXPECT_EQ(scheduler_->stats().missed_not_restored, 0);
  Add(Spec(prompt_, 1));  // from memory this time
  RunUntilIdle();
  EXPECT_EQ(worker_->reads(), 4);
  EXPECT_EQ(scheduler_->stats().prefix_hits, 512);
}

TEST_F(SchedulerDiskTest, OthersRunWhileARequestWaitsForItsBlocks) {
  const SequenceId waits = Begin(5);
  const SequenceId other = Add(Spec(Prompt(200, 9), 3));
  while (Step()) {
  }
  EXPECT_THAT(tokens_[other], SizeIs(3));
  EXPECT_THAT(tokens_[waits], IsEmpty());
  RunUntilIdle();
  EXPECT_EQ(tokens_[waits], expected_);
}

TEST_F(SchedulerDiskTest, ABlockThatCannotBeReadIsComputedAndAskedForOnce) {
  worker_->FailReads(1);
  const SequenceId id = Begin(5);
  DeliverTierReport();
  ASSERT_TRUE(Step());
  EXPECT_THAT(plan_.restores(), IsEmpty());
  EXPECT_THAT(plan_.starts(0).cached_blocks(), IsEmpty());
  EXPECT_THAT(plan_.drop_blocks(), SizeIs(1));
  EXPECT_EQ(scheduler_->stats().missed_not_restored, 64);
  EXPECT_EQ(scheduler_->stats().missed_absent, 0);
  RunUntilIdle();
  EXPECT_EQ(tokens_[id], expected_);
}

// Bug: one damaged block of a long prompt cost all blocks after it, and then a wait for them.
TEST_F(SchedulerDiskTest, BlocksAfterALostOneStayUntilItIsComputed) {
  const std::vector<int32_t> prompt = Prompt(64 * 12 + 10, 5);
  Add(Spec(prompt, 1));
  RunUntilIdle();
  for (const int64_t lost : {0, 5, 10}) {
    Restart(kWithDisk);
    SequenceSpec spec = Spec(prompt, 5);
    const std::vector<int32_t> expected = Expected(spec);
    const SequenceId id = Add(std::move(spec));
    ASSERT_TRUE(Step());
    ASSERT_THAT(plan_.restores(), SizeIs(12));
    worker_->FailReads(1, lost);
    DeliverTierReport();
    ASSERT_TRUE(Step());
    EXPECT_EQ(plan_.rows(0).begin(), static_cast<uint32_t>(64 * lost));
    EXPECT_EQ(plan_.rows(0).num_tokens(), 64u) << "more than the lost block";
    ASSERT_TRUE(Step());
    EXPECT_THAT(plan_.restores(), IsEmpty());
    ASSERT_THAT(plan_.starts(), SizeIs(1));
    EXPECT_THAT(plan_.starts(0).cached_blocks(), SizeIs(12));
    EXPECT_EQ(plan_.rows(0).num_tokens(), 10u);
    RunUntilIdle();
    EXPECT_EQ(tokens_[id], expected);
    EXPECT_EQ(finished_.at(id).summary.usage().cached_tokens().disk(), 64u * 11);
    EXPECT_EQ(scheduler_->stats().prefix_hits, 64 * 11);
    EXPECT_EQ(scheduler_->stats().preempted_restore, 1);
    EXPECT_EQ(worker_->reads(), 11);
  }
}

// Bug: each of any number of lost blocks cost a start of the sequence.
TEST_F(SchedulerDiskTest, AfterManyLostBlocksTheRestIsComputed) {
  SymbolicWorkerOptions options = kWithDisk;
  options.host_blocks = options.disk_blocks = 200;
  constexpr int64_t kMost = kvstore::StoredIndex::kMostGaps;
  const std::vector<int32_t> prompt = Prompt(64 * (2 * kMost + 8) + 10, 5);
  Make(options);
  Add(Spec(prompt, 1));
  RunUntilIdle();
  Restart(options);
  SequenceSpec spec = Spec(prompt, 5);
  const std::vector<int32_t> expected = Expected(spec);
  const SequenceId id = Add(std::move(spec));
  ASSERT_TRUE(Step());
  ASSERT_THAT(plan_.restores(), SizeIs(2 * kMost + 8));
  v1::TierReport report = worker_->TakeTierReport(SymbolicWorker::Disk::kDone);
  for (int lost = 0; lost < kMost + 2; ++lost) {
    report.mutable_restored(2 * lost)->set_error_code(
        static_cast<int32_t>(absl::StatusCode::kDataLoss));
  }
  ASSERT_EQ(scheduler_->OnTierReport(0, report, now_), absl::OkStatus());
  RunUntilIdle();
  EXPECT_EQ(tokens_[id], expected);
  EXPECT_EQ(scheduler_->stats().preempted_restore, kMost);
  EXPECT_EQ(finished_.at(id).summary.usage().cached_tokens().disk(), uint64_t{64} * kMost);
  EXPECT_EQ(scheduler_->stats().prefix_hits, 64 * kMost);
}

TEST_F(SchedulerDiskTest, TheLastBlockOfAChainIsLost) {
  worker_->FailReads(1, 3);
  const SequenceId id = Begin(5);
  DeliverTierReport();
  ASSERT_TRUE(Step());
  EXPECT_THAT(plan_.starts(0).cached_blocks(), SizeIs(3));
  EXPECT_EQ(plan_.rows(0).num_tokens(), 300u - 192);
  RunUntilIdle();
  EXPECT_EQ(tokens_[id], expected_);
  EXPECT_EQ(scheduler_->stats().preempted_restore, 0);
}

// Bug: a block whose header was damaged cost all blocks after it.
TEST_F(SchedulerDiskTest, BlocksThatAreNotStoredAreComputedBetweenOthers) {
  const std::vector<int32_t> prompt = Prompt(64 * 12 + 10, 5);
  Add(Spec(prompt, 1));
  RunUntilIdle();
  Restart(kWithDisk);
  Add(Spec(prompt, 1));
  ASSERT_TRUE(Step());
  ASSERT_THAT(plan_.restores(), SizeIs(12));
  v1::TierReport report;
  for (const int lost : {0, 5, 6, 9}) report.add_forgotten(plan_.restores(lost).prefix_hash());
  Restart(kWithDisk);
  ASSERT_EQ(scheduler_->OnTierReport(0, report, now_), absl::OkStatus());
  SequenceSpec spec = Spec(prompt, 5);
  const std::vector<int32_t> expected = Expected(spec);
  const SequenceId id = Add(std::move(spec));
  ASSERT_TRUE(Step());
  EXPECT_THAT(plan_.restores(), SizeIs(8));
  EXPECT_FALSE(Step());
  DeliverTierReport();
  const auto expect_row = [&](int64_t begin, int64_t num_tokens, int cached) {
    ASSERT_TRUE(Step());
    EXPECT_EQ(plan_.rows(0).begin(), static_cast<uint32_t>(64 * begin));
    EXPECT_EQ(plan_.rows(0).num_tokens(), static_cast<uint32_t>(num_tokens));
    EXPECT_THAT(plan_.starts(0).cached_blocks(), SizeIs(cached));
  };
  expect_row(0, 64, 0);
  expect_row(5, 128, 5);
  expect_row(9, 64, 9);
  expect_row(12, 10, 12);
  RunUntilIdle();
  EXPECT_EQ(tokens_[id], expected);
  EXPECT_EQ(worker_->reads(), 8);
}

TEST_F(SchedulerDiskTest, APreemptedRequestGivesItsLaterBlocksBack) {
  worker_->FailReads(1, 1);
  const SequenceId id = Begin(5);
  DeliverTierReport();
  ASSERT_TRUE(Step());  // reads the second block, holds the third and fourth
  ASSERT_EQ(plan_.rows(0).num_tokens(), 64u);
  EXPECT_EQ(Survive(kWithDisk), 1);
  EXPECT_EQ(scheduler_->CheckIntegrity(), absl::OkStatus());
  RunUntilIdle();
  EXPECT_EQ(tokens_[id], expected_);
}

TEST_F(SchedulerDiskTest, WhatComesTooLateIsComputed) {
  const SequenceId id = Begin(5);
  v1::TierReport first;
  first.add_restored()->set_block_id(plan_.restores(0).block_id());
  now_ += std::chrono::seconds(9);
  ASSERT_TRUE(scheduler_->OnTierReport(0, first, now_).ok());  // postpones the deadline
  now_ += std::chrono::seconds(9);
  EXPECT_FALSE(Step());
  ASSERT_EQ(scheduler_->NextDeadline(), now_ + std::chrono::seconds(1));
  now_ = *scheduler_->NextDeadline();
  const Scheduler::Planned planned = scheduler_->NextPlan(now_);
  ASSERT_TRUE(planned.plan.has_value());
  EXPECT_THAT(planned.plan->starts(0).cached_blocks(), SizeIs(1));
  EXPECT_THAT(planned.plan->drop_blocks(), SizeIs(3));
  EXPECT_FALSE(scheduler_->NextDeadline().has_value());
  EXPECT_EQ(scheduler_->CheckIntegrity(), absl::OkStatus());
  v1::TierReport late;
  late.add_restored()->set_block_id(planned.plan->drop_blocks(0));
  EXPECT_TRUE(scheduler_->OnTierReport(0, late, now_).ok());
  EXPECT_TRUE(scheduler_->Cancel(id, absl::CancelledError(""), now_).has_value());
}

// Bug: every request with a stored prefix waited ten seconds.
TEST_F(SchedulerDiskTest, ADiskThatDoesNotAnswerIsSetAsideAndTriedAgain) {
  const auto prompt = [](int32_t seed) { return Prompt(300, 100 + seed); };
  for (int32_t seed = 0; seed < 6; ++seed) {
    Add(Spec(prompt(seed), 1));
    RunUntilIdle();
  }
  Restart(kWithDisk);
  const SequenceId first = Add(Spec(prompt(0), 1));
  ASSERT_TRUE(Step());
  EXPECT_THAT(plan_.restores(), SizeIs(4));
  now_ += std::chrono::seconds(9);
  const SequenceId second = Add(Spec(prompt(1), 1));
  ASSERT_TRUE(Step());
  EXPECT_THAT(plan_.restores(), SizeIs(4));
  now_ += std::chrono::seconds(1);  // too late for the first; the second need not wait either
  while (Step()) {
  }
  EXPECT_TRUE(finished_.contains(first) && finished_.contains(second));
  EXPECT_TRUE(scheduler_->stats().disk_set_aside);
  const SequenceId third = Add(Spec(prompt(2), 1));
  ASSERT_TRUE(Step());
  EXPECT_THAT(plan_.restores(), IsEmpty());
  while (Step()) {
  }
  EXPECT_TRUE(finished_.contains(third));
  now_ += std::chrono::seconds(5);
  const SequenceId trial = Add(Spec(prompt(3), 1));
  const SequenceId beside = Add(Spec(prompt(4), 1));
  ASSERT_TRUE(Step());
  EXPECT_THAT(plan_.restores(), SizeIs(4));
  EXPECT_THAT(plan_.starts(), SizeIs(1));  // the one beside
  now_ += std::chrono::seconds(1);
  while (Step()) {
  }
  EXPECT_TRUE(finished_.contains(trial) && finished_.contains(beside));
  now_ += std::chrono::seconds(10);
  const SequenceId last = Add(Spec(prompt(5), 1));
  ASSERT_TRUE(Step());
  EXPECT_THAT(plan_.restores(), SizeIs(4));
  RunUntilIdle();
  EXPECT_FALSE(scheduler_->stats().disk_set_aside);
  EXPECT_TRUE(finished_.contains(last));
}

TEST_F(SchedulerDiskTest, RequestsForTheSameDocumentRestoreItOnce) {
  const SequenceId first = Begin(5);
  std::vector<int32_t> longer = prompt_;
  longer.insert(longer.end(), 100, 1);
  SequenceSpec spec = Spec(longer, 5);
  const std::vector<int32_t> expected = Expected(spec);
  const SequenceId second = Add(std::move(spec));
  EXPECT_FALSE(Step());
  EXPECT_EQ(scheduler_->stats().waiting, 1);
  RunUntilIdle();
  EXPECT_EQ(tokens_[first], expected_);
  EXPECT_EQ(tokens_[second], expected);
  EXPECT_EQ(worker_->reads(), 4);
  EXPECT_EQ(scheduler_->stats().prefix_hits, 512);
}

TEST_F(SchedulerDiskTest, ACancelledRestoreLeavesNothing) {
  const SequenceId id = Begin(5);
  EXPECT_TRUE(scheduler_->Cancel(id, absl::CancelledError(""), now_).has_value());
  EXPECT_EQ(scheduler_->CheckIntegrity(), absl::OkStatus());
  RunUntilIdle();
  EXPECT_EQ(worker_->num_blocks(), 0);
  EXPECT_EQ(scheduler_->stats().index.held_blocks, 0);
  Begin(5);  // they are still stored
}

TEST_F(SchedulerDiskTest, ABlockThatARankForgotIsNotAskedFor) {
  v1::TierReport report;
  kvstore::PrefixHash hash =
      kvstore::HashScope({.tenant = "",
                          .weights_hash = std::string(32, 'w'),
                          .kv_form = "rotated/float32",
                          .prefill_policy = CanonicalBytes(DensePolicy().prefill)});
  for (size_t i = 0; i < 3; ++i) {
    hash = kvstore::HashBlock(hash, absl::MakeConstSpan(prompt_).subspan(64 * i, 64), "");
  }
  report.add_forgotten(hash.data(), hash.size());
  ASSERT_TRUE(scheduler_->OnTierReport(0, report, now_).ok());
  Add(Spec(prompt_, 1));
  ASSERT_TRUE(Step());
  EXPECT_THAT(plan_.restores(), SizeIs(3));
}

TEST_F(SchedulerDiskTest, ABlockCountsOnlyWhenEveryRankHasIt) {
  const std::unique_ptr<SymbolicWorker> disk = std::move(worker_);
  SchedulerOptions options = Options(kWithDisk);
  options.num_ranks = 2;
  Make(kWithDisk, options);
  const v1::TierReport stored = worker_->TakeOverDisk(*disk);
  ASSERT_TRUE(scheduler_->OnTierReport(1, stored, now_).ok());
  EXPECT_EQ(scheduler_->stats().stored.partly_held, 4);
  Add(Spec(prompt_, 1));
  ASSERT_TRUE(Step());
  EXPECT_THAT(plan_.restores(), IsEmpty());
  RunUntilIdle();
  Make(kWithDisk, options);
  ASSERT_TRUE(worker_->TakeOverDisk(*disk).stored_size() == 4);
  for (int64_t rank : {0, 1}) ASSERT_TRUE(scheduler_->OnTierReport(rank, stored, now_).ok());
  Begin(2);
  const v1::TierReport restored = worker_->TakeTierReport(SymbolicWorker::Disk::kDone);
  ASSERT_THAT(restored.restored(), SizeIs(4));
  ASSERT_TRUE(scheduler_->OnTierReport(1, restored, now_).ok());
  EXPECT_FALSE(Step());  // rank 0 still reads
  ASSERT_TRUE(scheduler_->OnTierReport(0, restored, now_).ok());
  ASSERT_TRUE(Step());
  EXPECT_THAT(plan_.starts(0).cached_blocks(), SizeIs(4));
}

TEST_F(SchedulerDiskTest, NothingIsStoredWithoutADiskOnEveryRank) {
  Make(kWithDisk, Options({}));
  const SequenceId id = Add(Spec(prompt_, 1));
  while (Step()) EXPECT_THAT(plan_.persists(), IsEmpty());
  EXPECT_THAT(tokens_[id], SizeIs(1));
}

TEST_F(SchedulerDiskTest, BlocksThatASparseTailTouchesAreNotStored) {
  SequenceSpec sparse = Spec(Prompt(320, 5), 100);
  sparse.policy = SparsePolicy(64);
  Add(std::move(sparse));
  RunUntilIdle();
  EXPECT_EQ(worker_->num_stored(), 4 + 4);  // [0, 256)
}

TEST_F(SchedulerDiskTest, ReportsThatMakeNoSenseAreRefused) {
  v1::TierReport short_hash;
  short_hash.add_forgotten("abc");
  v1::TierReport short_block;
  short_block.add_stored()->set_prefix_hash(std::string(32, 'h'));
  for (const v1::TierReport& report : {short_hash, short_block}) {
    EXPECT_EQ(scheduler_->OnTierReport(0, report, now_).code(), absl::StatusCode::kInternal);
  }
}

}  // namespace
}  // namespace kvasir::coordinator
