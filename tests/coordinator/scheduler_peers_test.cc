// Blocks that come from peers, or do not.
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "coordinator/scheduling/scheduler.h"
#include "tests/coordinator/scheduler_fixture.h"

namespace kvasir::coordinator {
namespace {

using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr SymbolicWorkerOptions kOwner = {.disk_blocks = 100};
constexpr SymbolicWorkerOptions kWithPeers = {.has_peers = true};
constexpr SymbolicWorkerOptions kWithDiskToo = {.disk_blocks = 100, .has_peers = true};

class SchedulerPeersTest : public SchedulerTest {
 protected:
  // Another replica has read the first `tokens` tokens of the prompt of twelve blocks.
  void ReadAtPeer(int64_t tokens, const SymbolicWorkerOptions& options = kWithPeers) {
    Make(kOwner);
    Add(Spec({prompt_.begin(), prompt_.begin() + tokens}, 1));
    RunUntilIdle();
    peer_ = std::move(worker_);
    Make(options);
    worker_->AskPeer(*peer_);
  }
  // Asks for the prompt. The plan asks the ranks for so many blocks, and computes nothing.
  SequenceId Begin(int blocks) {
    SequenceSpec spec = Spec(prompt_, 5);
    expected_ = Expected(spec);
    const SequenceId id = Add(std::move(spec));
    EXPECT_TRUE(Step());
    EXPECT_THAT(plan_.restores(), SizeIs(blocks));
    EXPECT_THAT(plan_.rows(), IsEmpty());
    return id;
  }

  const std::vector<int32_t> prompt_ = Prompt(64 * 12 + 10, 5);
  std::unique_ptr<SymbolicWorker> peer_;
  std::vector<int32_t> expected_;
};

TEST_F(SchedulerPeersTest, APromptThatAPeerHasReadIsFetched) {
  ReadAtPeer(64 * 12 + 10);
  const SequenceId id = Begin(12);
  EXPECT_EQ(scheduler_->stats().restoring, 1);
  EXPECT_FALSE(Step());  // nothing to do but wait
  DeliverTierReport();
  ASSERT_TRUE(Step());
  EXPECT_THAT(plan_.starts(0).cached_blocks(), SizeIs(12));
  RunUntilIdle();
  EXPECT_EQ(tokens_[id], expected_);
  EXPECT_EQ(finished_.at(id).summary.usage().cached_tokens().peer(), 768u);
  EXPECT_EQ(scheduler_->stats().prefix_hits, 768);
  Add(Spec(prompt_, 1));  // from memory this time
  RunUntilIdle();
  EXPECT_EQ(worker_->reads(), 12);
}

TEST_F(SchedulerPeersTest, FromTheFirstAbsentBlockOnThePromptIsComputedWithoutPause) {
  ReadAtPeer(64 * 5 + 1);
  const SequenceId id = Begin(12);
  DeliverTierReport();
  ASSERT_TRUE(Step());
  EXPECT_EQ(plan_.rows(0).begin(), 64 * 5u);
  EXPECT_EQ(plan_.rows(0).num_tokens(), 64 * 7u + 10);  // not block by block, as after a lost one
  EXPECT_THAT(plan_.drop_blocks(), SizeIs(7));
  RunUntilIdle();
  EXPECT_EQ(tokens_[id], expected_);
  EXPECT_EQ(worker_->reads(), 5);
  // Nobody knew of the others: they are absent, not stored and not restored.
  EXPECT_EQ(scheduler_->stats().missed_not_restored, 0);
  EXPECT_EQ(scheduler_->stats().missed_absent, 64 * 7);
}

TEST_F(SchedulerPeersTest, APromptThatNoPeerHasIsAskedForOnceAndComputed) {
  Make(kWithPeers);
  const SequenceId id = Begin(12);
  DeliverTierReport();
  ASSERT_TRUE(Step());
  EXPECT_THAT(plan_.restores(), IsEmpty());
  EXPECT_EQ(plan_.rows(0).begin(), 0u);
  EXPECT_FALSE(scheduler_->stats().peers_set_aside);
  RunUntilIdle();
  EXPECT_EQ(tokens_[id], expected_);
}

TEST_F(SchedulerPeersTest, WhatFollowsOnStoredBlocksIsAskedForAtPeers) {
  ReadAtPeer(64 * 12 + 10, kWithDiskToo);
  Add(Spec({prompt_.begin(), prompt_.begin() + 64 * 4 + 1}, 1));
  RunUntilIdle();
  Restart(kWithDiskToo);
  ASSERT_EQ(scheduler_->stats().stored.blocks, 4);
  worker_->AskPeer(*peer_);
  const SequenceId id = Begin(12);
  RunUntilIdle();
  EXPECT_EQ(tokens_[id], expected_);
  EXPECT_EQ(finished_.at(id).summary.usage().cached_tokens().disk(), 256u);
  EXPECT_EQ(finished_.at(id).summary.usage().cached_tokens().peer(), 512u);
}

TEST_F(SchedulerPeersTest, AFewBlocksAreNotAskedFor) {
  Make(kWithPeers);
  Add(Spec(Prompt(64 * 3 + 10), 1));
  ASSERT_TRUE(Step());
  EXPECT_THAT(plan_.restores(), IsEmpty());
}

TEST_F(SchedulerPeersTest, WithoutPeersNobodyIsAsked) {
  Make({});
  Add(Spec(prompt_, 1));
  ASSERT_TRUE(Step());
  EXPECT_THAT(plan_.restores(), IsEmpty());
}

TEST_F(SchedulerPeersTest, ThoseThatAskForTheSameFetchItOnce) {
  ReadAtPeer(64 * 12 + 10);
  const SequenceId first = Begin(12);
  const SequenceId second = Add(Spec(prompt_, 5));
  EXPECT_FALSE(Step());
  RunUntilIdle();
  EXPECT_EQ(tokens_[first], expected_);
  EXPECT_EQ(tokens_[second], expected_);
  EXPECT_EQ(worker_->reads(), 12);
}

TEST_F(SchedulerPeersTest, PeersThatAreLateCostTheWaitAndNotTheDisk) {
  ReadAtPeer(64 * 12 + 10, kWithDiskToo);
  const SequenceId id = Begin(12);
  now_ += std::chrono::seconds(10);
  ASSERT_TRUE(Step());
  EXPECT_EQ(plan_.rows(0).begin(), 0u);
  EXPECT_FALSE(scheduler_->stats().disk_set_aside);
  EXPECT_TRUE(scheduler_->stats().peers_set_aside);  // once, each prompt waited for them
  RunUntilIdle();
  EXPECT_EQ(tokens_[id], expected_);
}

// Bug: each block that came allowed ten seconds more.
TEST_F(SchedulerPeersTest, BlocksThatTrickleInAreGivenUp) {
  ReadAtPeer(64 * 12 + 10);
  const SequenceId id = Begin(12);
  const v1::TierReport all = worker_->TakeTierReport(SymbolicWorker::Disk::kDone);
  int given = 0;
  for (; given < all.restored_size() && !Step(); ++given) {
    v1::TierReport one;
    *one.add_restored() = all.restored(given);
    ASSERT_EQ(scheduler_->OnTierReport(0, one, now_), absl::OkStatus());
    now_ += std::chrono::seconds(9);
  }
  EXPECT_EQ(given, 7);  // in 63 s
  EXPECT_EQ(plan_.rows(0).begin(), 64 * 7u);
  EXPECT_TRUE(scheduler_->stats().peers_set_aside);
  RunUntilIdle();
  EXPECT_EQ(tokens_[id], expected_);
}

// It takes room for all blocks that it asks for.
TEST_F(SchedulerPeersTest, ALongPromptAsksForItsBeginningFirstAndOnWhileAllOfItComes) {
  SymbolicWorkerOptions owner = kOwner, asker = kWithPeers;
  owner.disk_blocks = owner.host_blocks = asker.host_blocks = 1000;
  const std::vector<int32_t> prompt = Prompt(64 * 600 + 10, 5);
  Make(owner);
  Add(Spec({prompt.begin(), prompt.begin() + 64 * 400 + 1}, 1));
  RunUntilIdle();
  peer_ = std::move(worker_);
  Make(asker);
  worker_->AskPeer(*peer_);
  SequenceSpec spec = Spec(prompt, 5);
  expected_ = Expected(spec);
  const SequenceId id = Add(std::move(spec));
  for (const int blocks : {64, 256, 280}) {
    ASSERT_TRUE(Step());
    EXPECT_THAT(plan_.restores(), SizeIs(blocks));
    EXPECT_THAT(plan_.rows(), IsEmpty());
    DeliverTierReport();
  }
  ASSERT_TRUE(Step());
  EXPECT_EQ(plan_.rows(0).begin(), 64 * 400u);
  EXPECT_EQ(worker_->reads(), 400);
  RunUntilIdle();
  EXPECT_EQ(tokens_[id], expected_);
}

// Bug: a link on which nothing ever arrives cost each prompt the patience of its ranks.
TEST_F(SchedulerPeersTest, APeerThatFailsToGiveABlockIsNotAskedForAWhile) {
  ReadAtPeer(64 * 12 + 10);
  worker_->FailReads(12);
  const SequenceId id = Begin(12);
  DeliverTierReport();
  ASSERT_TRUE(Step());
  EXPECT_EQ(plan_.rows(0).begin(), 0u);
  EXPECT_TRUE(scheduler_->stats().peers_set_aside);
  RunUntilIdle();
  EXPECT_EQ(tokens_[id], expected_);
  Add(Spec(Prompt(64 * 12 + 1, 11), 1));
  ASSERT_TRUE(Step());
  EXPECT_THAT(plan_.restores(), IsEmpty());
  RunUntilIdle();
  now_ += std::chrono::seconds(5);  // all failures of one question count once
  Add(Spec(Prompt(64 * 12 + 1, 12), 1));
  ASSERT_TRUE(Step());
  EXPECT_THAT(plan_.restores(), SizeIs(12));
}

TEST_F(SchedulerPeersTest, PeersThatAreSlowerThanComputingAreSetAsideForAWhile) {
  const std::vector<int32_t> prompt = Prompt(64 * 200 + 10, 5);
  SymbolicWorkerOptions owner = kOwner, asker = kWithPeers;
  owner.disk_blocks = owner.host_blocks = asker.host_blocks = 1000;
  Make(owner);
  Add(Spec(prompt, 1));
  RunUntilIdle();
  peer_ = std::move(worker_);
  // Asks for the prompt, whose first blocks come after `wait`. The next plan asks for so many more.
  const auto ask = [&](absl::Duration wait, int more) {
    const SequenceId id = Add(Spec(prompt, 1));
    ASSERT_TRUE(Step());
    ASSERT_THAT(plan_.restores(), SizeIs(64));
    now_ += absl::ToChronoNanoseconds(wait);
    DeliverTierReport();
    ASSERT_TRUE(Step());
    EXPECT_THAT(plan_.restores(), SizeIs(more));
    EXPECT_EQ(scheduler_->stats().peers_set_aside, more == 0);
    EXPECT_TRUE(scheduler_->Cancel(id, absl::CancelledError(""), now_).has_value());
    RunUntilIdle();
  };
  SchedulerOptions options = Options(asker);
  Make(asker, options);
  worker_->AskPeer(*peer_);
  Add(Spec(Prompt(64 * 3, 9), 1));  // too short to ask: 192 tokens in 100 ms
  RunUntilIdle();
  ask(absl::Seconds(2.1), 136);  // with two steps of 100 ms, which are not the peers' doing
  Make(asker, options);
  worker_->AskPeer(*peer_);
  Add(Spec(Prompt(64 * 3, 9), 1));
  RunUntilIdle();
  ask(absl::Seconds(2.5), 0);
  Add(Spec(Prompt(64 * 100 + 1, 11), 1));
  ASSERT_TRUE(Step());
  EXPECT_THAT(plan_.restores(), IsEmpty());
  RunUntilIdle();
  now_ += std::chrono::seconds(5);
  Add(Spec(Prompt(64 * 100 + 1, 12), 1));
  ASSERT_TRUE(Step());
  EXPECT_THAT(plan_.restores(), SizeIs(64));
}

}  // namespace
}  // namespace kvasir::coordinator
