// The KV store with lean blocks over a real disk tier: blocks in use whose pages lie on disk only.
#include <filesystem>
#include <fstream>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <memory>
#include <random>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"

#include "kvstore/kv_store.h"
#include "tests/kvstore/forwarding_residency.h"
#include "tests/kvstore/store_user.h"
#include "tests/kvstore/test_blocks.h"
#include "tests/support/scratch_directory.h"

namespace kvasir::kvstore {
namespace {

using kernels::PagedKv;
using ::testing::HasSubstr;
using ::testing::SizeIs;

const kernels::KvLayout kLayout = SmallShard().layout;
constexpr int64_t kPages = 4;  // of a block
constexpr int64_t kExtent = 12288;
constexpr int64_t kFront = 8192;  // of an extent: all before its pages
// A page of 512 bytes takes a frame of two units of the disk.
constexpr int64_t kFrame = 2 * kExtentAlignment;

class KvStoreLeanTest : public ::testing::Test, protected StoreUser {
 protected:
  void SetUp() override { Start(); }
  void TearDown() override {
    ExpectIntegrity();
    store_.reset();  // before the disk
  }
  void ExpectIntegrity() {
    if (store_ == nullptr) return;
    const absl::Status integrity = store_->CheckIntegrity();
    EXPECT_TRUE(integrity.ok()) << integrity;
  }

  static KvStoreOptions Options() {
    return {.shard = SmallShard(),
            .device_bytes = 2 * kLayout.block_bytes(),
            // Of this half is for pages: as many extents, with one for transfers.
            .host_bytes = 2 * 100 * kExtent,
            .num_slots = 1,
            .max_blocks_per_slot = 300,
            .freed_memory = FreedMemory::kPoisoned,
            .on_demand_bytes = 300 * kLayout.block_bytes()};
  }
  void Start(KvStoreOptions options = Options()) {
    store_.reset();
    step_ = 0;
    store_ = KvStore::Create(options, OpenDiskTier(disk_.Options(1000)).value()).value();
  }
  // Makes sealed blocks whose names are their ids.
  void MakeMany(int64_t first, int64_t count) {
    for (int64_t id = first; id < first + count; ++id) MakeSealed(id, static_cast<uint32_t>(id));
  }
  void StoreAll(int64_t first, int64_t count) {
    for (int64_t id = first; id < first + count; ++id) {
      store_->Persist(BlockId(id), TokensOf(static_cast<uint32_t>(id)));
    }
    Flush();
  }

  testing::ScratchDirectory scratch_;
  const std::string directory_ = scratch_.path() + "/kv";
  TestStore disk_{directory_};
};

TEST_F(KvStoreLeanTest, ARestoredBlockBringsItsFrontAloneAndThenThePagesThatAreRead) {
  MakeSealed(1, 100);
  store_->Persist(BlockId(1), TokensOf(100));
  Flush();
  Start();  // another process
  ASSERT_TRUE(Restore(2, 100).ok());
  EXPECT_EQ(store_->stats().tier.read_bytes, kFront);
  EXPECT_EQ(store_->stats().lean_blocks, 1);
  EXPECT_EQ(store_->stats().host_blocks_used, 0);
  EXPECT_EQ(store_->stats().pages.reads, 0);
  store_->Bind(0, 0, store_->Get(BlockId(2)).value());
  const PagedKv kv = store_->BeginStep(++step_).value();
  EXPECT_EQ(kv.Peek(0, 0, 1, 0).tier(), kernels::PageTier::kAbsent);
  EXPECT_NE(kv.Read(0, 0, 1, 0, kLayout.page_bytes()).page(), nullptr);
  EXPECT_NE(kv.Find(0, 0, 1, 0).page(), nullptr);
  ASSERT_TRUE(store_->EndStep().ok());
  EXPECT_EQ(store_->stats().pages.reads, 1);
  EXPECT_EQ(store_->stats().pages.waited, 1);
  EXPECT_EQ(store_->TakeWaits(0).pages, 1);
  EXPECT_EQ(store_->TakeWaits(0).pages, 0);
  store_->Unbind(0, 0);
  ExpectHolds(2, 100);
  EXPECT_EQ(store_->stats().pages.reads, kPages);
}

TEST_F(KvStoreLeanTest, BlocksInUseLeaveAFullHostTierOnceTheyAreStored) {
  const int64_t room = store_->stats().host_blocks_total;
  ASSERT_EQ(store_->host_blocks(), room + 300);
  MakeMany(1, 2 * room);  // nobody asked for their writes
  const KvStoreStats stats = store_->stats();
  EXPECT_GE(stats.shed_blocks, room);
  EXPECT_EQ(stats.lean_blocks, stats.shed_blocks);
  EXPECT_LE(stats.host_blocks_used, room);
  ExpectIntegrity();
  for (int64_t id = 1; id <= 2 * room; ++id) ExpectHolds(id, static_cast<uint32_t>(id));
  EXPECT_EQ(store_->stats().pages.reads, kPages * stats.shed_blocks);
}

// A block's header may be due when the block has left the host tier, where seals end later, as on a
// GPU.
TEST_F(KvStoreLeanTest, ABlockThatLeftBeforeItsHeaderWasWrittenNeedsNone) {
  // Its first block is whole for its write alone, which asks first.
  class LateSeals final : public ForwardingResidency {
   public:
    using ForwardingResidency::ForwardingResidency;
    bool SealsAtOnce() const override { return false; }
    absl::StatusOr<bool> IsExtentWhole(int64_t extent) override {
      EXPECT_LT(extent, host().num_extents());
      if (first_ < 0) first_ = extent;
      return extent != first_ || ++calls_ == 1;
    }

   private:
    int64_t first_ = -1;
    int64_t calls_ = 0;  // about the first block
  };
  const auto make = [](const ResidencyOptions& options) {
    return absl::StatusOr<std::unique_ptr<PageResidency>>(
        std::make_unique<LateSeals>(ArenaResidency::Make(options).value()));
  };
  store_.reset();
  store_ = KvStore::Create(Options(), OpenDiskTier(disk_.Options(1000)).value(), make).value();
  const int64_t room = store_->stats().host_blocks_total;
  MakeSealed(1, 1);
  store_->Persist(BlockId(1), TokensOf(1));
  MakeMany(2, 2 * room - 1);
  EXPECT_GE(store_->stats().shed_blocks, room);
  for (int64_t id = 1; id <= 2 * room; ++id) ExpectHolds(id, static_cast<uint32_t>(id));
}

TEST_F(KvStoreLeanTest, ABoundBlockThatLeavesStaysBound) {
  const int64_t room = store_->stats().host_blocks_total;
  MakeSealed(1, 1);
  StoreAll(1, 1);
  store_->Bind(0, 7, store_->Get(BlockId(1)).value());
  for (int64_t id = 2; id <= room + 5; ++id) {
    const Block block = store_->Open(BlockId(id)).value();
    store_->Bind(0, 0, block);
    const PagedKv kv = store_->BeginStep(++step_).value();
    ForEachByte(kv, static_cast<uint32_t>(id),
                [](std::byte& byte, std::byte expected) { byte = expected; });
    ASSERT_TRUE(store_->EndStep().ok());
    const auto name = static_cast<uint32_t>(id);
    ASSERT_TRUE(store_->Seal(BlockId(id), HashOf(name), TokensOf(name)).ok());
  }
  EXPECT_GT(store_->stats().shed_blocks, 0);
  ExpectIntegrity();
  const PagedKv kv = store_->BeginStep(++step_).value();
  EXPECT_EQ(kv.Peek(0, 7, 0, 0).tier(), kernels::PageTier::kAbsent);
  EXPECT_NE(kv.Read(0, 7, 0, 0, kLayout.page_bytes()).page(), nullptr);
  ASSERT_TRUE(store_->EndStep().ok());
  store_->Unbind(0, 0);
}

TEST_F(KvStoreLeanTest, FewFramesHoldThePagesOfManyBlocks) {
  MakeMany(1, 80);
  StoreAll(1, 80);
  KvStoreOptions options = Options();
  options.host_bytes = 2 * 140 * kFrame;  // more than one thread may use at once, and few more
  Start(options);
  for (int64_t id = 1; id <= 80; ++id) ASSERT_TRUE(Restore(id, static_cast<uint32_t>(id)).ok());
  std::mt19937 random(1);
  for (int i = 0; i < 300; ++i) {
    const int64_t id = 1 + static_cast<int64_t>(random() % 80);
    ExpectHolds(id, static_cast<uint32_t>(id));
  }
  const PageCacheStats pages = store_->stats().pages;
  EXPECT_EQ(pages.frames, 140);
  EXPECT_GT(pages.evictions, 0);
  EXPECT_EQ(pages.reads - pages.evictions, 140);
  EXPECT_EQ(pages.failed_reads, 0);
}

TEST_F(KvStoreLeanTest, WantedPagesComeTogetherAndTheNextLayersAreGuessed) {
  MakeSealed(1, 1);
  StoreAll(1, 1);
  Start();
  ASSERT_TRUE(Restore(1, 1).ok());
  store_->Bind(0, 0, store_->Get(BlockId(1)).value());
  const auto page_of = [](const PagedKv& kv, int64_t layer) {
    return kv.PageIndex(0, 0, layer, 0);
  };
  const auto await = [&](int64_t reads) {
    while (store_->stats().pages.reads < reads) absl::SleepFor(absl::Milliseconds(1));
  };
  PagedKv kv = store_->BeginStep(++step_).value();
  for (int64_t layer = 0; layer < 2; ++layer) {
    const int64_t page = page_of(kv, layer);
    kv.on_disk->Want(layer, {&page, 1});
    await(layer + 1);
    kv.Read(0, 0, layer, 0, 1);
  }
  ASSERT_TRUE(store_->EndStep().ok());
  EXPECT_EQ(store_->stats().pages.waited, 0);
  EXPECT_EQ(store_->stats().pages.prefetches, 0);
  store_->Unbind(0, 0);
  store_->Drop(BlockId(1));
  ASSERT_TRUE(Restore(1, 1).ok());  // the same place in the tables, without its pages
  store_->Bind(0, 0, store_->Get(BlockId(1)).value());
  kv = store_->BeginStep(++step_).value();
  const int64_t first = page_of(kv, 0);
  kv.on_disk->Want(0, {&first, 1});
  await(4);  // with that of the next layer
  kv.Read(0, 0, 1, 0, 1);
  ASSERT_TRUE(store_->EndStep().ok());
  EXPECT_EQ(store_->stats().pages.prefetches, 1);
  EXPECT_EQ(store_->stats().pages.used_prefetches, 1);
  store_->Unbind(0, 0);
}

TEST_F(KvStoreLeanTest, APageThatIsDamagedIsAbsentAndItsBlockIsLost) {
  MakeSealed(1, 1);
  StoreAll(1, 1);
  Start();
  ASSERT_TRUE(Restore(1, 1).ok());
  const std::filesystem::directory_iterator segments(directory_ + "/segments");
  std::fstream file(segments->path(), std::ios::in | std::ios::out | std::ios::binary);
  ASSERT_TRUE(file.is_open());
  file.seekp(kFront + 3 * kLayout.page_bytes() + 5);  // in the last page
  file.put('x');
  file.close();
  store_->Bind(0, 0, store_->Get(BlockId(1)).value());
  const PagedKv kv = store_->BeginStep(++step_).value();
  EXPECT_NE(kv.Read(0, 0, 0, 0, 1).page(), nullptr);
  EXPECT_EQ(kv.Read(0, 0, 1, 1, 1).tier(), kernels::PageTier::kAbsent);
  ASSERT_TRUE(store_->EndStep().ok());
  const std::vector<CorruptBlock> corrupt = store_->TakeCorrupt();
  ASSERT_THAT(corrupt, SizeIs(1));
  EXPECT_EQ(corrupt[0].id, BlockId(1));
  EXPECT_THAT(corrupt[0].slots, ::testing::ElementsAre(0));
  EXPECT_THAT(std::string(corrupt[0].status.message()), HasSubstr("layer 1, KV head 1"));
  EXPECT_EQ(store_->stats().tier.checksum_failures, 1);
  EXPECT_EQ(store_->stats().tier.failed_reads, 0);
  EXPECT_FALSE(store_->Holds(BlockId(1)));
  EXPECT_THAT(store_->TakeStoredChanges().forgotten, SizeIs(1));
  store_->Unbind(0, 0);
  EXPECT_EQ(store_->stats().lean_blocks, 0);
  EXPECT_FALSE(Restore(2, 1).ok());
}

// Bug: the disk was said to have returned other bytes.
TEST_F(KvStoreLeanTest, APageThatCannotBeReadIsCountedAsSuch) {
  MakeSealed(1, 1);
  StoreAll(1, 1);
  Start();
  ASSERT_TRUE(Restore(1, 1).ok());
  store_->Bind(0, 0, store_->Get(BlockId(1)).value());
  const PagedKv kv = store_->BeginStep(++step_).value();
  disk_.control->Set({.read_error = 1});
  EXPECT_EQ(kv.Read(0, 0, 1, 1, 1).tier(), kernels::PageTier::kAbsent);
  ASSERT_TRUE(store_->EndStep().ok());
  EXPECT_THAT(store_->TakeCorrupt(), SizeIs(1));
  EXPECT_EQ(store_->stats().tier.failed_reads, 1);
  EXPECT_EQ(store_->stats().tier.checksum_failures, 0);
  EXPECT_FALSE(store_->Holds(BlockId(1)));
  store_->Unbind(0, 0);
}

TEST_F(KvStoreLeanTest, ADiskThatFailsLeavesRoomForNoMoreBlocksAndNothingHangs) {
  const int64_t room = store_->stats().host_blocks_total;
  disk_.control->Set({.write_error = 1});
  MakeMany(1, room - 1);
  const Block last = store_->Open(BlockId(1000)).value();
  const absl::Status refused = store_->Open(BlockId(1001)).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("none of them can go to disk"));
  disk_.control->Set({});
  disk_.now_ms += 10'000;  // it is tried again
  for (int i = 0; i < 1000 && store_->stats().tier.written_blocks == 0; ++i) {
    store_->Persist(BlockId(1), TokensOf(1));
    store_->PollTier();
    absl::SleepFor(absl::Milliseconds(5));
  }
  EXPECT_TRUE(store_->Open(BlockId(1002)).ok());
  EXPECT_GT(store_->stats().shed_blocks, 0);
}

TEST_F(KvStoreLeanTest, AStoredBlockInUseStaysWhenTheDiskIsFull) {
  store_.reset();
  store_ = KvStore::Create(Options(), OpenDiskTier(disk_.Options(8)).value()).value();
  MakeSealed(1, 1);
  StoreAll(1, 1);
  store_->Drop(BlockId(1));
  ASSERT_TRUE(Restore(1, 1).ok());
  for (int64_t id = 2; id < 40; ++id) {
    MakeSealed(id, static_cast<uint32_t>(id));
    StoreAll(id, 1);
    store_->Drop(BlockId(id));
  }
  EXPECT_GT(store_->stats().tier.evictions, 0);
  ExpectHolds(1, 1);
  EXPECT_EQ(store_->stats().pages.failed_reads, 0);
}

TEST_F(KvStoreLeanTest, KeyCodesAreKeptWhenABlockLeavesAndMadeAgainWhenItComesBack) {
  KvStoreOptions options = Options();
  options.key_codes = true;
  Start(options);
  const int64_t room = store_->stats().host_blocks_total;
  MakeSealed(1, 1);
  const auto codes = [&] {
    store_->Bind(0, 0, store_->Get(BlockId(1)).value());
    const PagedKv kv = store_->BeginStep(++step_).value();
    const std::byte* begin = kv.KeyCodes(0, 0, 0, 0);
    std::vector<std::byte> copy(begin, begin + kLayout.block_key_codes_bytes());
    EXPECT_TRUE(store_->EndStep().ok());
    store_->Unbind(0, 0);
    return copy;
  };
  StoreAll(1, 1);
  store_->Drop(BlockId(1));
  ASSERT_TRUE(Restore(1, 1).ok());
  const std::vector<std::byte> again = codes();
  EXPECT_NE(again, std::vector<std::byte>(again.size()));
  EXPECT_EQ(store_->stats().tier.read_bytes, kExtent);  // codes are not stored: all keys are read
  EXPECT_EQ(store_->stats().lean_blocks, 1);
  EXPECT_EQ(store_->stats().host_blocks_used, 0);
  MakeMany(2, 2 * room);
  EXPECT_GE(store_->stats().shed_blocks, room);
  EXPECT_EQ(codes(), again);
  // Codes of a block that left by itself are those of one that came back.
  ASSERT_TRUE(store_->Where(BlockId(2)).stored);
  ExpectHolds(2, 2);
}

TEST(KvStoreLeanOptions, TooFewFramesForTheThreadsAreRefusedWithWhatToRaise) {
  testing::ScratchDirectory scratch;
  const TestStore disk(scratch.path() + "/kv");
  const absl::Status status = KvStore::Create({.shard = SmallShard(),
                                               .device_bytes = 2 * kLayout.block_bytes(),
                                               .host_bytes = 20 * kExtent,
                                               .num_slots = 1,
                                               .max_blocks_per_slot = 4,
                                               .on_demand_bytes = 10 * kLayout.block_bytes()},
                                              OpenDiskTier(disk.Options(10)).value())
                                  .status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("raise kv_host_size_gb"));
}

}  // namespace
}  // namespace kvasir::kvstore
