// Peers whose ranks hold other KV heads than the one that asks.
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"

#include "tests/kvstore/heads/head_blocks.h"
#include "tests/worker/peers/peer_tier_fixture.h"

namespace kvasir::worker {
namespace {

using kvstore::ExtentFormat;
using kvstore::HashOf;
using kvstore::NamedBlock;
using kvstore::RankFormat;
using kvstore::TierCompletion;

class PeerDegreesTest : public PeerTierTest {
 protected:
  // A worker with `count` heads from `first` on.
  std::unique_ptr<PeerTier> Rank(int64_t first, int64_t count,
                                 std::vector<std::string> peers = {}) const {
    PeerTierOptions options = Options(std::move(peers));
    options.shard = RankFormat(first, count).shard();
    return Make(options);
  }
  static void LendTo(PeerTier& tier, const NamedBlock& block) {
    tier.lent_blocks()->Add(block.identity.hash, block.extent);
  }
  // Reads the block called `name` from peers into memory that a rank of these heads has.
  TierCompletion Read(PeerTier& tier, int64_t first, int64_t count, uint32_t name) {
    const ExtentFormat format = RankFormat(first, count);
    memory_ = std::make_unique<NamedBlock>(format, 99, 1);
    tier.Read({{.ticket = ++ticket_, .hash = HashOf(name), .extent = memory_->extent}});
    TierCompletion found;
    EXPECT_TRUE(Await([&] {
      for (TierCompletion& completion : tier.Poll().completions) found = std::move(completion);
      return found.ticket == ticket_;
    }));
    if (found.status.ok()) {
      EXPECT_EQ(format.Verify(found.block, memory_->extent), absl::OkStatus());
      const NamedBlock expected(format, name, found.block.generation);
      EXPECT_EQ(memory_->extent, absl::Span<const std::byte>(expected.extent));
    }
    return found;
  }
  static bool AwaitLinks(const PeerTier& tier, int64_t count) {
    return Await([&] { return tier.stats().peers.linked == count; });
  }

  std::unique_ptr<NamedBlock> memory_;
  uint64_t ticket_ = 0;
};

TEST_P(PeerDegreesTest, ARankIsGivenItsHeadsByOneThatHasMore) {
  const auto owner = Rank(0, 4);
  const NamedBlock block(RankFormat(0, 4), 7, 3);
  LendTo(*owner, block);
  for (const auto& [first, count] : {std::pair{0, 2}, {2, 2}, {1, 1}, {3, 1}}) {
    const auto asker = Rank(first, count, {owner->address()});
    ASSERT_TRUE(AwaitLinks(*asker, 1));
    const TierCompletion found = Read(*asker, first, count, 7);
    EXPECT_TRUE(found.status.ok()) << found.status;
    EXPECT_EQ(found.block.generation, 3u);
    EXPECT_TRUE(absl::IsNotFound(Read(*asker, first, count, 8).status));
    EXPECT_EQ(asker->stats().peers.fetched_bytes, RankFormat(first, count).extent_bytes());
  }
}

TEST_P(PeerDegreesTest, ARankAsksSeveralEachForTheHeadsThatItHas) {
  const auto low = Rank(0, 2), high = Rank(2, 2);
  const NamedBlock low_block(RankFormat(0, 2), 7, 3), high_block(RankFormat(2, 2), 7, 8);
  LendTo(*low, low_block);
  const auto asker = Rank(0, 4, {low->address(), high->address()});
  ASSERT_TRUE(AwaitLinks(*asker, 2));
  EXPECT_TRUE(absl::IsNotFound(Read(*asker, 0, 4, 7).status)) << "half of the heads are nowhere";
  EXPECT_EQ(asker->stats().peers.absent_blocks, 1);
  LendTo(*high, high_block);
  EXPECT_TRUE(Read(*asker, 0, 4, 7).status.ok());
  EXPECT_EQ(asker->stats().peers.fetched_blocks, 1);
}

TEST_P(PeerDegreesTest, HeadsThatOneReplicaLacksComeFromTheNext) {
  const auto low = Rank(0, 2), high = Rank(2, 2), middle = Rank(1, 2), all = Rank(0, 4);
  const NamedBlock low_block(RankFormat(0, 2), 7, 3), whole(RankFormat(0, 4), 7, 5);
  LendTo(*low, low_block);
  LendTo(*all, whole);
  const auto asker =
      Rank(0, 4, {low->address(), high->address(), middle->address(), all->address()});
  ASSERT_TRUE(AwaitLinks(*asker, 4));
  EXPECT_TRUE(Read(*asker, 0, 4, 7).status.ok());
  EXPECT_TRUE(Await([&] { return all->stats().peers.lent_blocks == 2; })) << "heads 2 and 3";
  EXPECT_EQ(low->stats().peers.lent_blocks, 1);
  EXPECT_EQ(asker->stats().peers.fetched_blocks, 1);
}

TEST_P(PeerDegreesTest, ManyBlocksAtATimeAreCopiedWithinTheirRoom) {
  constexpr uint32_t kBlocks = 600;
  const auto owner = Rank(0, 4);
  const auto asker = Rank(2, 2, {owner->address()});
  ASSERT_TRUE(AwaitLinks(*asker, 1));
  std::vector<std::unique_ptr<NamedBlock>> blocks, places;
  std::vector<kvstore::TierRead> reads;
  for (uint32_t name = 0; name < kBlocks; ++name) {
    blocks.push_back(std::make_unique<NamedBlock>(RankFormat(0, 4), name, 1));
    places.push_back(std::make_unique<NamedBlock>(RankFormat(2, 2), 0, 0));
    LendTo(*owner, *blocks.back());
    reads.push_back({.ticket = name, .hash = HashOf(name), .extent = places.back()->extent});
  }
  asker->Read(reads);
  size_t ended = 0;
  EXPECT_TRUE(Await([&] {
    for (const TierCompletion& completion : asker->Poll().completions) {
      EXPECT_TRUE(completion.status.ok()) << completion.status;
      const auto name = static_cast<uint32_t>(completion.ticket);
      const NamedBlock expected(RankFormat(2, 2), name, 1);
      EXPECT_EQ(places[name]->extent, absl::Span<const std::byte>(expected.extent));
      ++ended;
    }
    return ended == kBlocks;
  }));
}

TEST_P(PeerDegreesTest, AWrongPageInAPartIsRefusedAndItsSenderIsLeft) {
  const auto low = Rank(0, 2), high = Rank(2, 2);
  const NamedBlock low_block(RankFormat(0, 2), 7, 3), high_block(RankFormat(2, 2), 7, 3);
  high_block.extent[static_cast<size_t>(RankFormat(2, 2).page_offset(1))] ^= std::byte{1};
  LendTo(*low, low_block);
  LendTo(*high, high_block);
  const auto asker = Rank(0, 4, {low->address(), high->address()});
  ASSERT_TRUE(AwaitLinks(*asker, 2));
  EXPECT_TRUE(absl::IsDataLoss(Read(*asker, 0, 4, 7).status));
  EXPECT_EQ(asker->stats().peers.refused_blocks, 1);
  EXPECT_TRUE(AwaitLinks(*asker, 1));
}

// The copy's bounds get a new checksum: it must not hide damage.
TEST_P(PeerDegreesTest, DamagedBoundsAreNotCopied) {
  const auto owner = Rank(0, 4);
  const NamedBlock block(RankFormat(0, 4), 7, 3);
  block.extent[static_cast<size_t>(RankFormat(0, 4).bounds_offset())] ^= std::byte{1};
  LendTo(*owner, block);
  const auto asker = Rank(0, 2, {owner->address()});
  ASSERT_TRUE(AwaitLinks(*asker, 1));
  EXPECT_TRUE(absl::IsNotFound(Read(*asker, 0, 2, 7).status));
}

TEST_P(PeerDegreesTest, AWorkerWithoutCommonHeadsIsNotAsked) {
  const auto other = Rank(2, 2), owner = Rank(0, 4);
  const auto asker = Rank(0, 2, {other->address(), owner->address()});
  ASSERT_TRUE(AwaitLinks(*asker, 1));
  const NamedBlock block(RankFormat(2, 2), 7, 3);
  LendTo(*other, block);
  EXPECT_TRUE(absl::IsNotFound(Read(*asker, 0, 2, 7).status));
  EXPECT_EQ(other->stats().peers.lent_blocks, 0);
}

INSTANTIATE_TEST_SUITE_P(Transports, PeerDegreesTest, ::testing::Values("sm,tcp", "tcp"),
                         NameOfTransports);

}  // namespace
}  // namespace kvasir::worker
