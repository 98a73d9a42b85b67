// Two stores whose tiers below are each other's peers.
#include <memory>
#include <string>
#include <thread>

#include "gtest/gtest.h"
#include "spdlog/spdlog.h"

#include "kvstore/kv_store.h"
#include "tests/kvstore/store_user.h"
#include "tests/kvstore/test_blocks.h"
#include "worker/peers/peer_tier.h"

namespace kvasir::worker {
namespace {

using kvstore::BlockId;
using kvstore::ExtentFormat;
using kvstore::HashOf;
using kvstore::KvStore;
using kvstore::PrefixHash;
using kvstore::SmallShard;
using kvstore::TokensOf;

const kernels::KvLayout kLayout = SmallShard().layout;

struct Replica : kvstore::StoreUser {
  explicit Replica(const std::vector<std::string>& peers, kvstore::HostMemory* memory = nullptr) {
    auto below =
        PeerTier::Create(
            {.shard = SmallShard(), .peers = peers, .secret = proto::GroupSecret::Read("").value()},
            nullptr)
            .value();
    address = below->address();
    const int64_t extent = ExtentFormat::Create(SmallShard()).value().extent_bytes();
    store_ = KvStore::Create({.shard = SmallShard(),
                              .device_bytes = 3 * kLayout.block_bytes(),
                              .host_bytes = 9 * extent,
                              .num_slots = 1,
                              .max_blocks_per_slot = 16,
                              .freed_memory = kvstore::FreedMemory::kPoisoned,
                              .memory = memory,
                              .owner = "rank 0 of 1"},
                             std::move(below))
                 .value();
  }
  ~Replica() { EXPECT_EQ(store_->CheckIntegrity(), absl::OkStatus()); }
  void AwaitLink() const {
    while (store_->stats().tier.peers.linked == 0) std::this_thread::yield();
  }

  std::string address;
};

TEST(PeerStoresTest, SealedBlocksAreLentAndFreedOnesAreNot) {
  Replica owner({});
  Replica asker({owner.address});
  asker.AwaitLink();
  owner.MakeSealed(1, 100);
  ASSERT_TRUE(asker.Restore(11, 100).ok());
  EXPECT_TRUE(asker.store_->Where(BlockId(11)).from_peer);
  asker.ExpectHolds(11, 100);
  EXPECT_EQ(asker.store_->stats().restored_blocks, 1);
  owner.store_->Drop(BlockId(1));
  EXPECT_TRUE(absl::IsNotFound(asker.Restore(12, 100)));
  owner.MakeSealed(2, 200);  // perhaps in the extent of the first
  EXPECT_TRUE(absl::IsNotFound(asker.Restore(13, 100)));
  EXPECT_TRUE(asker.Restore(14, 200).ok());
  EXPECT_EQ(asker.store_->stats().failed_restores, 0) << "an absent block counts as a failure";
}

TEST(PeerStoresTest, WhatWasFetchedIsLentOn) {
  Replica first({});
  Replica second({first.address});
  Replica third({second.address});
  second.AwaitLink();
  third.AwaitLink();
  first.MakeSealed(1, 100);
  EXPECT_TRUE(absl::IsNotFound(third.Restore(1, 100)));
  ASSERT_TRUE(second.Restore(1, 100).ok());
  ASSERT_TRUE(third.Restore(2, 100).ok());
  third.ExpectHolds(2, 100);
}

// The peer is proven, and lies: it says that the block is another tenant's.
TEST(PeerStoresTest, ThePeersWordForATenantIsNotBelieved) {
  const PrefixHash mallory = HashOf(1);
  const PrefixHash alice = HashOf(2);
  const auto memory = kvstore::HostMemory::Open("").value();
  Replica liar({});
  liar.MakeSealed(1, 100, mallory);
  {
    Replica asker({liar.address}, memory.get());
    asker.AwaitLink();
    ASSERT_TRUE(asker.Restore(2, 100, alice).ok());
    ASSERT_EQ(asker.store_->stats().tier.peers.fetched_blocks, 1);
    EXPECT_EQ(asker.Erase(mallory).blocks_in_use, 0);
    EXPECT_EQ(asker.Erase(alice).blocks_in_use, 1);
    asker.ExpectHolds(2, 100);
  }
  Replica again({}, memory.get());  // whose memory says whose it is
  ASSERT_EQ(again.store_->stats().adoption.found, 1);
  EXPECT_EQ(again.Erase(mallory).host_blocks, 0);
  EXPECT_EQ(again.Erase(alice).host_blocks, 1);
}

// Bug: blocks of a peer have its generations, which may be those of blocks that were sealed here.
TEST(PeerStoresTest, AFetchedBlockIsAdoptedBesideOneOfTheSameGeneration) {
  const auto memory = kvstore::HostMemory::Open("").value();
  Replica owner({});
  owner.MakeSealed(1, 100);
  {
    Replica asker({owner.address}, memory.get());
    asker.AwaitLink();
    asker.MakeSealed(1, 200);
    ASSERT_TRUE(asker.Restore(2, 100).ok());
  }
  Replica again({}, memory.get());
  EXPECT_EQ(again.store_->stats().adoption.found, 2);
  EXPECT_TRUE(again.Restore(1, 100).ok());
  EXPECT_TRUE(again.Restore(2, 200).ok());
  again.ExpectHolds(1, 100);
  again.ExpectHolds(2, 200);
}

TEST(PeerStoresTest, AdoptedBlocksAreLentOnceTheyAreUsed) {
  const auto memory = kvstore::HostMemory::Open("").value();
  { Replica({}, memory.get()).MakeSealed(1, 100); }
  Replica owner({}, memory.get());
  Replica asker({owner.address});
  asker.AwaitLink();
  EXPECT_TRUE(absl::IsNotFound(asker.Restore(1, 100)));
  ASSERT_TRUE(owner.Restore(1, 100).ok());
  EXPECT_TRUE(asker.Restore(2, 100).ok());
}

}  // namespace
}  // namespace kvasir::worker
