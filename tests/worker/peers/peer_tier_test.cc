#include "worker/peers/peer_tier.h"

#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

#include "tests/support/iterations.h"
#include "tests/support/memory_tier.h"
#include "tests/worker/peers/peer_tier_fixture.h"

namespace kvasir::worker {
namespace {

using kvstore::HashOf;
using kvstore::TestBlock;
using kvstore::TierCompletion;

TEST_P(PeerTierTest, ABlockThatAPeerLendsIsFetchedAndVerified) {
  const auto owner = Make(Options());
  Asker asker{.tier = Make(Options({owner->address()}))};
  ASSERT_TRUE(asker.AwaitLinks(1));
  const TestBlock block(Format(), 7, 3);
  EXPECT_FALSE(asker.tier->Holds(HashOf(7)));
  EXPECT_TRUE(asker.tier->MayRead(HashOf(7)));
  const TierCompletion absent = asker.Read(7);
  EXPECT_TRUE(absl::IsNotFound(absent.status)) << absent.status;
  EXPECT_TRUE(absent.from_peer);
  Lend(*owner, block);
  const TierCompletion found = asker.Read(7);
  ASSERT_TRUE(found.status.ok()) << found.status;
  EXPECT_TRUE(found.from_peer);
  EXPECT_EQ(found.block.generation, 3u);
  EXPECT_TRUE(asker.HasBytesOf(block, 7));
  const kvstore::PeerStats stats = asker.tier->stats().peers;
  EXPECT_EQ(stats.fetched_blocks, 1);
  EXPECT_EQ(stats.fetched_bytes, Format().extent_bytes());
  EXPECT_EQ(stats.absent_blocks, 1);
  EXPECT_TRUE(Await([&] { return owner->stats().peers.lent_blocks == 1; }));
  owner->lent_blocks()->Remove(HashOf(7), block.extent);
  EXPECT_TRUE(absl::IsNotFound(asker.Read(7).status));
}

TEST_P(PeerTierTest, ManyBlocksAtATimeComeEachToItsPlace) {
  constexpr uint32_t kBlocks = 700;  // more than one message names
  const auto owner = Make(Options());
  Asker asker{.tier = Make(Options({owner->address()}))};
  ASSERT_TRUE(asker.AwaitLinks(1));
  std::vector<std::unique_ptr<TestBlock>> blocks, places;
  std::vector<kvstore::TierRead> reads;
  for (uint32_t name = 0; name < kBlocks; ++name) {
    blocks.push_back(std::make_unique<TestBlock>(Format(), name, 1));
    places.push_back(std::make_unique<TestBlock>(Format(), 0, 0));
    if (name % 5 != 0) Lend(*owner, *blocks.back());
    reads.push_back({.ticket = name, .hash = HashOf(name), .extent = places.back()->extent});
  }
  asker.tier->Read(reads);
  size_t ended = 0;
  EXPECT_TRUE(Await([&] {
    for (const TierCompletion& completion : asker.tier->Poll().completions) {
      const uint64_t name = completion.ticket;
      EXPECT_EQ(completion.status.code(),
                name % 5 == 0 ? absl::StatusCode::kNotFound : absl::StatusCode::kOk);
      EXPECT_EQ(blocks[name]->extent == places[name]->extent, name % 5 != 0);
      ++ended;
    }
    return ended == kBlocks;
  }));
}

TEST_P(PeerTierTest, PeersAreAskedOneAfterTheOtherAndItselfNever) {
  const auto first = Make(Options());
  const auto second = Make(Options());
  Asker asker{.tier = Make(Options({first->address(), second->address()}))};
  ASSERT_TRUE(asker.AwaitLinks(2));
  const TestBlock block(Format(), 7, 1);
  Lend(*second, block);
  EXPECT_TRUE(asker.Read(7).status.ok());
  EXPECT_TRUE(absl::IsNotFound(asker.Read(8).status));
  EXPECT_EQ(asker.tier->stats().peers.absent_blocks, 1);

  PeerTierOptions own = Options({asker.tier->address(), second->address()});
  own.listen = asker.tier->address();
  asker.tier.reset();
  asker.tier = Make(own);
  ASSERT_TRUE(asker.AwaitLinks(1));
  EXPECT_TRUE(asker.Read(7).status.ok());
}

TEST_P(PeerTierTest, WrongBytesAreRefusedAndTheirSenderIsNotAskedAgain) {
  const auto owner = Make(Options());
  Asker asker{.tier = Make(Options({owner->address()}))};
  ASSERT_TRUE(asker.AwaitLinks(1));
  const TestBlock good(Format(), 1, 1);
  TestBlock wrong(Format(), 2, 1);
  wrong.extent[static_cast<size_t>(Format().page_offset(0))] ^= std::byte{1};
  Lend(*owner, good);
  Lend(*owner, wrong);
  const TierCompletion refused = asker.Read(2);
  EXPECT_TRUE(absl::IsDataLoss(refused.status)) << refused.status;
  EXPECT_EQ(asker.tier->stats().peers.refused_blocks, 1);
  ASSERT_TRUE(asker.AwaitLinks(0));
  EXPECT_TRUE(absl::IsNotFound(asker.Read(1).status));
  EXPECT_FALSE(asker.tier->MayRead(HashOf(1)));
}

// Whether anybody reads the byte at `at` of an extent. Between its parts lies padding.
bool IsRead(int64_t at) {
  const kernels::KvLayout& layout = Format().shard().layout;
  const auto is_in = [at](int64_t begin, int64_t bytes) {
    return at >= begin && at < begin + bytes;
  };
  return at < Format().checksums_offset() + layout.pages_per_block() * 8 ||
         is_in(Format().bounds_offset(), layout.block_bounds_bytes()) ||
         is_in(Format().pages_offset(), layout.block_bytes());
}

// The block is sealed, and then a bit of what is sent is another one.
TEST_P(PeerTierTest, NoBitThatFlippedOnTheWayIsTaken) {
  std::mt19937 rng(5);
  int64_t noticed = 0;
  for (int64_t i = 0; i < testing::Iterations(20); ++i) {
    const auto owner = Make(Options());
    Asker asker{.tier = Make(Options({owner->address()}))};
    ASSERT_TRUE(asker.AwaitLinks(1));
    TestBlock sent(Format(), 1, 1);
    const size_t at = rng() % sent.extent.size();
    sent.extent[at] ^= std::byte{1} << (rng() % 8);
    Lend(*owner, sent);
    const absl::Status taken = asker.Read(1).status;
    if (absl::IsUnavailable(taken)) continue;  // the machine was too busy for the peer to answer
    ASSERT_EQ(absl::IsDataLoss(taken), IsRead(static_cast<int64_t>(at))) << "byte " << at;
    if (!taken.ok()) ++noticed;
  }
  EXPECT_GT(noticed, testing::Iterations(20) / 4);
}

TEST_P(PeerTierTest, AnotherBlockUnderTheHashIsRefused) {
  const auto owner = Make(Options());
  Asker asker{.tier = Make(Options({owner->address()}))};
  ASSERT_TRUE(asker.AwaitLinks(1));
  const TestBlock block(Format(), 2, 1);
  owner->lent_blocks()->Add(HashOf(3), block.extent);
  EXPECT_TRUE(absl::IsDataLoss(asker.Read(3).status));
}

TEST_P(PeerTierTest, APeerOfAnotherModelIsNotAsked) {
  PeerTierOptions options = Options();
  options.shard.weights_hash = std::string(32, 'x');
  ExpectNotAsked(options);
}

TEST_P(PeerTierTest, APeerWithAnotherSecretIsNotAskedAndGivesNothing) {
  PeerTierOptions options = Options();
  options.secret = other_secret_;
  ExpectNotAsked(options);
}

TEST_P(PeerTierTest, APeerThatComesBackIsAskedAgain) {
  auto owner = Make(Options());
  PeerTierOptions again = Options();
  again.listen = owner->address();
  Asker asker{.tier = Make(Options({owner->address()}))};
  ASSERT_TRUE(asker.AwaitLinks(1));
  owner.reset();
  ASSERT_TRUE(asker.AwaitLinks(0));
  EXPECT_TRUE(absl::IsNotFound(asker.Read(2).status));
  owner = Make(again);
  ASSERT_TRUE(asker.AwaitLinks(1));
  const TestBlock block(Format(), 2, 1);
  Lend(*owner, block);
  EXPECT_TRUE(asker.Read(2).status.ok());
}

TEST_P(PeerTierTest, BlocksOnDiskAreReadThereAndNoPeerIsAsked) {
  const auto owner = Make(Options());
  Asker asker{.tier = Make(Options({owner->address()}),
                           std::make_unique<kvstore::MemoryTier>(Format(), 1))};
  ASSERT_TRUE(asker.AwaitLinks(1));
  const TestBlock on_disk(Format(), 1, 1), at_peer(Format(), 2, 1);
  Lend(*owner, on_disk);
  Lend(*owner, at_peer);
  asker.tier->Write({{.ticket = 1, .block = on_disk.identity, .extent = on_disk.extent}});
  asker.ticket = 1;
  EXPECT_TRUE(Await([&] { return !asker.tier->Poll().completions.empty(); }));
  EXPECT_TRUE(asker.tier->Holds(HashOf(1)));
  EXPECT_FALSE(asker.Read(1).from_peer);
  EXPECT_TRUE(asker.Read(2).from_peer);
  EXPECT_EQ(asker.tier->stats().peers.fetched_blocks, 1);
}

INSTANTIATE_TEST_SUITE_P(Transports, PeerTierTest, ::testing::Values("sm,tcp", "tcp"),
                         NameOfTransports);

}  // namespace
}  // namespace kvasir::worker
