// The KV store over a real disk tier: persist, restart, restore.
#include <array>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <map>
#include <random>

#include "kernels/append/key_codes.h"
#include "kvstore/kv_store.h"
#include "tests/kvstore/store_user.h"
#include "tests/kvstore/test_blocks.h"
#include "tests/support/iterations.h"
#include "tests/support/memory_tier.h"
#include "tests/support/scratch_directory.h"

namespace kvasir::kvstore {
namespace {

using kernels::PagedKv;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

const kernels::KvLayout kLayout = SmallShard().layout;
constexpr int64_t kExtent = 12288;

class KvStoreTierTest : public ::testing::Test, protected StoreUser {
 protected:
  void SetUp() override { Start(); }
  void TearDown() override {
    if (store_ != nullptr) {
      const absl::Status integrity = store_->CheckIntegrity();
      EXPECT_TRUE(integrity.ok()) << integrity;
    }
    store_.reset();  // before the disk
  }

  void Start(int64_t disk_blocks = 100, bool key_codes = false) {
    store_.reset();
    step_ = 0;
    const int64_t codes_bytes = key_codes ? kLayout.block_key_codes_bytes() : 0;
    store_ = KvStore::Create({.shard = SmallShard(),
                              .device_bytes = 3 * kLayout.block_bytes(),
                              .host_bytes = 9 * (kExtent + codes_bytes),
                              .num_slots = 1,
                              .max_blocks_per_slot = 16,
                              .key_codes = key_codes,
                              .freed_memory = FreedMemory::kPoisoned},
                             OpenDiskTier(disk_.Options(disk_blocks)).value())
                 .value();
    ASSERT_EQ(store_->host_blocks(), 8);
  }
  std::vector<std::string> Segments() const {
    std::vector<std::string> paths;
    for (const auto& file : std::filesystem::directory_iterator(directory_ + "/segments")) {
      paths.push_back(file.path());
    }
    return paths;
  }

  testing::ScratchDirectory scratch_;
  const std::string directory_ = scratch_.path() + "/kv";
  TestStore disk_{directory_};
};

TEST_F(KvStoreTierTest, ABlockOutlivesItsIdAndTheProcess) {
  MakeSealed(1, 100);
  MakeSealed(2, 200);
  EXPECT_FALSE(store_->Where(BlockId(1)).stored);
  store_->Persist(BlockId(1), TokensOf(100));
  store_->Persist(BlockId(2), TokensOf(200));
  Flush();
  EXPECT_TRUE(store_->Where(BlockId(1)).stored);
  EXPECT_THAT(store_->TakeStoredChanges().stored, SizeIs(2));
  EXPECT_THAT(store_->TakeStoredChanges().stored, IsEmpty());
  store_->Drop(BlockId(1));
  EXPECT_EQ(store_->stats().host_blocks_used, 1);
  EXPECT_TRUE(Restore(11, 100).ok());
  ExpectHolds(11, 100);
  Start();
  std::map<uint32_t, int32_t> inventory;
  for (const StoredBlock& block : store_->Inventory()) {
    inventory[block.hash[0]] = block.tokens[63];
  }
  EXPECT_EQ(inventory, (std::map<uint32_t, int32_t>{{100, 100}, {200, 200}}));
  EXPECT_FALSE(store_->Holds(BlockId(1)));
  EXPECT_TRUE(Restore(21, 200).ok());
  EXPECT_TRUE(Restore(22, 100).ok());
  ExpectHolds(21, 200);
  ExpectHolds(22, 100);
  EXPECT_EQ(store_->stats().restored_blocks, 2);
}

// Key codes are not stored: they follow from the keys.
TEST_F(KvStoreTierTest, ARestoredBlockHasTheCodesOfItsKeys) {
  Start(100, /*key_codes=*/true);
  MakeSealed(1, 100);
  store_->Persist(BlockId(1), TokensOf(100));
  Flush();
  Start(100, /*key_codes=*/true);
  ASSERT_TRUE(Restore(2, 100).ok());
  store_->Bind(0, 0, store_->Get(BlockId(2)).value());
  const PagedKv kv = store_->BeginStep(++step_).value();
  const auto codes = [&] {
    const std::byte* begin = kv.KeyCodes(0, 0, 0, 0);
    return std::vector<std::byte>(begin, begin + kLayout.block_key_codes_bytes());
  };
  const std::vector<std::byte> restored = codes();
  std::memset(kv.KeyCodes(0, 0, 0, 0), 0xab, restored.size());
  ASSERT_TRUE(kernels::RebuildKeyCodes(kv, 0, 0, kBlockTokens).ok());
  EXPECT_EQ(restored, codes());
  ASSERT_TRUE(store_->EndStep().ok());
  store_->Unbind(0, 0);
}

TEST_F(KvStoreTierTest, KeyCodesAreKeptOnlyWhenAskedFor) {
  EXPECT_EQ(store_->BeginStep(1).value().key_codes, nullptr);
  ASSERT_TRUE(store_->EndStep().ok());
}

TEST_F(KvStoreTierTest, ARestoredBlockIsOwedToTheDiskUntilItsFirstUse) {
  MakeSealed(1, 100);
  store_->Persist(BlockId(1), TokensOf(100));
  Flush();
  EXPECT_FALSE(store_->Where(BlockId(1)).restored);
  ASSERT_TRUE(Restore(2, 100).ok());
  EXPECT_TRUE(store_->Where(BlockId(2)).restored);
  EXPECT_EQ(store_->Where(BlockId(2)).device_pages, 0);
  ExpectHolds(2, 100);
  EXPECT_FALSE(store_->Where(BlockId(2)).restored);
}

TEST_F(KvStoreTierTest, ABlockThatIsBeingRestoredCannotBeUsedButDropped) {
  MakeSealed(1, 100);
  store_->Persist(BlockId(1), TokensOf(100));
  Flush();
  ASSERT_TRUE(store_->Restore(BlockId(2), HashOf(100)).ok());
  EXPECT_FALSE(store_->Holds(BlockId(2)));
  EXPECT_EQ(store_->Get(BlockId(2)).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(store_->Restore(BlockId(2), HashOf(100)).code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(store_->Open(BlockId(2)).status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(store_->Restore(BlockId(3), HashOf(7)).code(), absl::StatusCode::kNotFound);
  store_->Drop(BlockId(2));
  EXPECT_EQ(store_->stats().host_blocks_used, 1);
  ASSERT_TRUE(Restore(4, 100).ok());  // it ends after the dropped one
  ExpectHolds(4, 100);
}

TEST_F(KvStoreTierTest, PersistingWhatIsNotSealedOrStoredAlreadyDoesNothing) {
  const Block open = store_->Open(BlockId(1)).value();
  store_->Persist(BlockId(1), TokensOf(1));
  store_->Persist(BlockId(99), TokensOf(1));
  MakeSealed(2, 200);
  store_->Persist(BlockId(2), TokensOf(200));
  store_->Persist(BlockId(2), TokensOf(200));
  Flush();
  MakeSealed(3, 200);  // another sequence computed the same
  store_->Persist(BlockId(3), TokensOf(200));
  Flush();
  EXPECT_EQ(store_->stats().tier.written_blocks, 1);
}

TEST_F(KvStoreTierTest, BlocksThatGoWhileTheirWriteWaitsAreWrittenUnlessTheirRoomIsNeeded) {
  for (uint32_t name = 0; name < 8; ++name) MakeSealed(name, name);
  for (uint32_t name = 0; name < 8; ++name) store_->Persist(BlockId(name), TokensOf(name));
  EXPECT_GT(store_->stats().dropped_writes, 0) << "half of the host tier may wait";
  for (uint32_t name = 0; name < 8; ++name) store_->Drop(BlockId(name));
  // All of the host tier is available at once, whatever the disk does.
  for (int64_t id = 10; id < 18; ++id) MakeSealed(id, static_cast<uint32_t>(id));
  ASSERT_TRUE(store_->CheckIntegrity().ok());
  Flush();
  const KvStoreStats stats = store_->stats();
  EXPECT_EQ(stats.host_blocks_used, 8);
  EXPECT_EQ(stats.tier.written_blocks + stats.dropped_writes, 8);
  EXPECT_EQ(stats.queued_writes, 0);
}

// Who sends a part may write any tenant into its header.
TEST_F(KvStoreTierTest, ThePartsWordForATenantIsNotBelieved) {
  const PrefixHash mallory = HashOf(1);
  const PrefixHash alice = HashOf(2);
  MakeSealed(1, 100, mallory);
  store_->Export(7, BlockId(1));
  std::vector<ExportedBlock> exported;
  for (; exported.empty(); exported = store_->TakeExported()) store_->PollTier();
  ASSERT_EQ(exported[0].status, absl::OkStatus());
  store_->Drop(BlockId(1));
  std::vector<HeadPart> parts;
  for (const ExportedBlock::Part& part : exported[0].parts) {
    parts.push_back({.head = part.head, .extent = part.extent});
  }
  const BlockIdentity block = {.hash = HashOf(100), .tokens = TokensOf(100), .owner = alice};
  ASSERT_EQ(store_->Import(BlockId(2), block, parts), absl::OkStatus());
  store_->Persist(BlockId(2), TokensOf(100));
  Flush();
  const ErasedBlocks of_mallory = Erase(mallory);
  EXPECT_EQ(of_mallory.blocks_in_use + of_mallory.below_blocks, 0);
  ExpectHolds(2, 100);
  const ErasedBlocks of_alice = Erase(alice);
  EXPECT_EQ(of_alice.blocks_in_use, 1);
  EXPECT_EQ(of_alice.below_blocks, 1);
}

TEST_F(KvStoreTierTest, ASlowTierEndsAFlushAndCostsItsBlocks) {
  for (uint32_t name = 1; name <= 4; ++name) MakeSealed(name, name);
  for (uint32_t name = 1; name <= 4; ++name) store_->Persist(BlockId(name), TokensOf(name));
  const absl::Status flushed = store_->Flush(absl::ZeroDuration());
  EXPECT_TRUE(absl::IsDeadlineExceeded(flushed)) << flushed;
  const KvStoreStats stats = store_->stats();
  EXPECT_THAT(flushed.message(),
              HasSubstr(absl::StrCat(stats.dropped_writes, " blocks were not written")));
  EXPECT_EQ(stats.dropped_writes, 3) << "one has room to be under way";
  EXPECT_EQ(stats.tier.written_blocks, 1) << "a write under way was left";
  EXPECT_EQ(stats.queued_writes, 0);
  for (uint32_t name = 1; name <= 4; ++name) ExpectHolds(name, name);
  for (uint32_t name = 1; name <= 4; ++name) store_->Persist(BlockId(name), TokensOf(name));
  Flush();
  EXPECT_EQ(store_->stats().tier.written_blocks, 4);
}

TEST_F(KvStoreTierTest, ADiskThatFailsCostsNothingButItsBlocks) {
  disk_.control->Set({.write_error = 1});
  for (uint32_t name = 1; name <= 4; ++name) {
    MakeSealed(name, name);
    store_->Persist(BlockId(name), TokensOf(name));
  }
  Flush();
  EXPECT_FALSE(store_->stats().tier.writable);
  EXPECT_THAT(store_->TakeStoredChanges().stored, IsEmpty());
  for (uint32_t name = 1; name <= 4; ++name) ExpectHolds(name, name);
  disk_.control->Set({});
  disk_.now_ms += 1001;
  store_->Persist(BlockId(2), TokensOf(2));
  Flush();
  EXPECT_TRUE(store_->stats().tier.writable);
  EXPECT_THAT(store_->TakeStoredChanges().stored, SizeIs(1));
}

TEST_F(KvStoreTierTest, DamageOnDiskIsAMissAndIsReported) {
  MakeSealed(1, 100);
  store_->Persist(BlockId(1), TokensOf(100));
  Flush();
  Start();
  EXPECT_THAT(Segments(), SizeIs(1));
  std::fstream file(Segments()[0], std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(8192 + 700);  // in the second page
  file.put('x');
  file.close();
  EXPECT_EQ(Restore(2, 100).code(), absl::StatusCode::kDataLoss);
  EXPECT_FALSE(store_->Holds(BlockId(2)));
  EXPECT_EQ(store_->stats().host_blocks_used, 0);
  EXPECT_EQ(store_->stats().failed_restores, 1);
  EXPECT_EQ(store_->stats().tier.checksum_failures, 1);
  EXPECT_THAT(store_->TakeStoredChanges().forgotten, ElementsAre(HashOf(100)));
  EXPECT_EQ(store_->Restore(BlockId(3), HashOf(100)).code(), absl::StatusCode::kNotFound);
}

TEST_F(KvStoreTierTest, WhatTheDiskEvictsIsReported) {
  Start(/*disk_blocks=*/2);
  for (uint32_t name = 1; name <= 3; ++name) {
    MakeSealed(name, name);
    store_->Persist(BlockId(name), TokensOf(name));
    Flush();
  }
  const StoredChanges changes = store_->TakeStoredChanges();
  EXPECT_THAT(changes.forgotten, ElementsAre(HashOf(1)));
  EXPECT_THAT(changes.stored, SizeIs(2));
}

TEST_F(KvStoreTierTest, ATierOfAnotherShardIsRefused) {
  KvStoreOptions options = {.shard = SmallShard(),
                            .device_bytes = 3 * kLayout.block_bytes(),
                            .host_bytes = 9 * kExtent,
                            .num_slots = 1,
                            .max_blocks_per_slot = 16};
  options.shard.first_head = 2;
  store_.reset();
  const absl::Status status =
      KvStore::Create(options, OpenDiskTier(disk_.Options(10)).value()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("KV heads of dimension 2 from 2"));
}

TEST_F(KvStoreTierTest, ANeededExtentForTransfersIsPartOfTheLeastSize) {
  const KvStoreOptions options = {.shard = SmallShard(),
                                  .device_bytes = 3 * kLayout.block_bytes(),
                                  .host_bytes = 2 * kExtent,
                                  .num_slots = 1,
                                  .max_blocks_per_slot = 16};
  EXPECT_TRUE(KvStore::Create(options).ok());
  store_.reset();
  const absl::Status status =
      KvStore::Create(options, OpenDiskTier(disk_.Options(10)).value()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("at least 3 blocks"));
}

// A disk beside a peer that says nothing until it is let go, and has no block.
class SilentPeerTier : public MemoryTier {
 public:
  SilentPeerTier() : MemoryTier(ExtentFormat::Create(SmallShard()).value(), 1) {}

  bool MayRead(const PrefixHash&) const override { return true; }
  void Read(std::vector<TierRead> reads) override {
    const auto at_peer = std::stable_partition(
        reads.begin(), reads.end(), [this](const TierRead& read) { return Holds(read.hash); });
    for (auto read = at_peer; read != reads.end(); ++read) {
      asked.push_back(read->hash);
      unanswered_.push_back(read->ticket);
    }
    MemoryTier::Read({reads.begin(), at_peer});
  }
  TierEvents Poll() override {
    TierEvents events = MemoryTier::Poll();
    if (is_silent) return events;
    for (const uint64_t ticket : std::exchange(unanswered_, {})) {
      events.completions.push_back({.ticket = ticket,
                                    .status = absl::NotFoundError("no peer has it"),
                                    .block = {},
                                    .from_peer = true});
    }
    return events;
  }

  bool is_silent = true;
  std::vector<PrefixHash> asked;

 private:
  std::vector<uint64_t> unanswered_;
};

// Bug: reads at a peer that had stopped took all transfers, and the disk was taken for dead.
TEST_F(KvStoreTierTest, ReadsAtASilentPeerLeaveRoomForTheDisk) {
  auto tier = std::make_unique<SilentPeerTier>();
  SilentPeerTier& peer = *tier;
  store_ = KvStore::Create({.shard = SmallShard(),
                            .device_bytes = 3 * kLayout.block_bytes(),
                            .host_bytes = 4 * kBlocksPerTransfer * kExtent,
                            .num_slots = 1,
                            .max_blocks_per_slot = 16},
                           std::move(tier))
               .value();
  ASSERT_EQ(store_->host_blocks(), 4 * kBlocksPerTransfer - 4);
  MakeSealed(1, 100);
  store_->Persist(BlockId(1), TokensOf(100));
  Flush();
  for (uint32_t name = 200; name < 210; ++name) {
    ASSERT_TRUE(store_->Restore(BlockId(name), HashOf(name)).ok());
  }
  while (peer.asked.size() < 2) store_->PollTier();                // their memory comes
  EXPECT_THAT(peer.asked, ElementsAre(HashOf(200), HashOf(201)));  // of four transfers
  EXPECT_TRUE(Restore(2, 100).ok());
  MakeSealed(3, 101);
  store_->Persist(BlockId(3), TokensOf(101));
  Flush();
  EXPECT_TRUE(peer.Holds(HashOf(101)));
  EXPECT_THAT(peer.asked, SizeIs(2));
  EXPECT_TRUE(store_->CheckIntegrity().ok());

  store_->Drop(BlockId(202));
  peer.is_silent = false;
  while (store_->TierIsBusy()) store_->PollTier();
  EXPECT_THAT(peer.asked, SizeIs(9));  // all but the dropped one, in their order
  EXPECT_EQ(peer.asked[2], HashOf(203));
  EXPECT_EQ(peer.asked[8], HashOf(209));
  EXPECT_THAT(store_->TakeRestored(), SizeIs(9));
}

// Blocks come and go, the disk fails now and then, the process restarts: held blocks stay right.
TEST_F(KvStoreTierTest, RandomRestartsAndFaultsNeverGiveWrongBytes) {
  std::mt19937 rng(11);
  std::map<int64_t, uint32_t> held;
  int64_t next_id = 0;
  int64_t restored = 0;
  for (int64_t round = 0; round < testing::Iterations(600); ++round) {
    disk_.now_ms += 300;
    if (rng() % 40 == 0) {
      held.clear();
      disk_.control->Set({});
      Start(/*disk_blocks=*/12);
    }
    if (rng() % 10 == 0) {
      disk_.control->Set({.read_error = 0.1,
                          .write_error = 0.1,
                          .sync_error = 0.1,
                          .short_transfer = 0.5,
                          .flip_read = 0.1});
    }
    if (rng() % 4 == 0) Flush();  // how fast writes end decides what can be restored
    if (held.size() == 8) {
      const auto victim = std::next(held.begin(), static_cast<int64_t>(rng() % held.size()));
      store_->Drop(BlockId(victim->first));
      held.erase(victim);
    }
    const uint32_t name = static_cast<uint32_t>(rng() % 20);
    const int64_t id = next_id++;
    if (Restore(id, name).ok()) {
      ++restored;
    } else {
      MakeSealed(id, name);
      store_->Persist(BlockId(id), TokensOf(name));
    }
    held[id] = name;
    const auto any = std::next(held.begin(), static_cast<int64_t>(rng() % held.size()));
    ExpectHolds(any->first, any->second);
    ASSERT_TRUE(store_->CheckIntegrity().ok());
    ASSERT_THAT(store_->TakeCorrupt(), IsEmpty());
  }
  EXPECT_GT(restored, testing::Iterations(600) / 20);
}

}  // namespace
}  // namespace kvasir::kvstore
