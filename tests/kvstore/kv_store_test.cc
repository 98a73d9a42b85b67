#include "kvstore/kv_store.h"

#include <algorithm>
#include <cstring>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <thread>
#include <utility>

#include "tests/kvstore/forwarding_residency.h"

namespace kvasir::kvstore {
namespace {

using kernels::KvLayout;
using kernels::PagedKv;
using kernels::PageTier;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr KvLayout kLayout = {
    .num_layers = 2, .num_kv_heads = 2, .head_dim = 2, .dtype = kernels::DType::kBFloat16};

const std::vector<int32_t> kTokens(kBlockTokens);

PrefixHash Hash(int64_t id) {
  PrefixHash hash{};
  std::memcpy(hash.data(), &id, sizeof(id));
  return hash;
}

// A store with three blocks of device tier and six of host tier, and the steps of an engine.
class KvStoreTest : public ::testing::Test {
 protected:
  void SetUp() override {
    store_ = KvStore::Create({.shard = {.layout = kLayout},
                              .device_bytes = 3 * kLayout.block_bytes(),
                              .host_bytes = 6 * 12288,
                              .num_slots = 2,
                              .max_blocks_per_slot = 8,
                              .freed_memory = FreedMemory::kPoisoned})
                 .value();
    ASSERT_EQ(store_->device_blocks(), 3);
    ASSERT_EQ(store_->host_blocks(), 6);
  }
  void TearDown() override { EXPECT_TRUE(store_->CheckIntegrity().ok()); }

  // Opens a block, binds it, fills every page with the id, seals it.
  Block MakeSealed(int64_t id, int64_t slot, int64_t index) {
    Block block = store_->Open(BlockId(id)).value();
    store_->Bind(slot, index, block);
    PagedKv kv = store_->BeginStep(++step_).value();
    for (int64_t layer = 0; layer < kLayout.num_layers; ++layer) {
      for (int64_t head = 0; head < kLayout.num_kv_heads; ++head) {
        std::memset(kv.Peek(slot, index, layer, head).page(), static_cast<int>(id),
                    static_cast<size_t>(kLayout.page_bytes()));
      }
    }
    EXPECT_TRUE(store_->EndStep().ok());
    EXPECT_TRUE(store_->Seal(BlockId(id), Hash(id), kTokens).ok());
    return block;
  }
  // Runs one step that reads `bytes` of every page of the block. Returns its first byte.
  int Read(int64_t slot, int64_t index, int64_t bytes = kLayout.page_bytes()) {
    const PagedKv kv = store_->BeginStep(++step_).value();
    int first = -1;
    for (int64_t layer = 0; layer < kLayout.num_layers; ++layer) {
      for (int64_t head = 0; head < kLayout.num_kv_heads; ++head) {
        first = static_cast<int>(*kv.Read(slot, index, layer, head, bytes).page());
      }
    }
    EXPECT_TRUE(store_->EndStep().ok());
    return first;
  }
  int64_t DevicePages(int64_t id) const { return store_->Where(BlockId(id)).device_pages; }

  std::unique_ptr<KvStore> store_;
  uint32_t step_ = 0;
};

// An arena whose host memory is available only for some extents.
class ScarceMemory final : public ForwardingResidency {
 public:
  ScarceMemory(std::unique_ptr<PageResidency> inner, int64_t extents)
      : ForwardingResidency(std::move(inner)), extents_(extents) {}
  absl::Status AwaitExtent(int64_t extent) override {
    return extent < extents_ ? absl::OkStatus() : absl::ResourceExhaustedError("it did not come");
  }

 private:
  const int64_t extents_;
};

TEST_F(KvStoreTest, ABlockWhoseHostMemoryDoesNotComeIsRefused) {
  const auto make = [](const ResidencyOptions& options) {
    return absl::StatusOr<std::unique_ptr<PageResidency>>(
        std::make_unique<ScarceMemory>(ArenaResidency::Make(options).value(), 2));
  };
  store_ = KvStore::Create({.shard = {.layout = kLayout},
                            .device_bytes = 3 * kLayout.block_bytes(),
                            .host_bytes = 6 * 12288,
                            .num_slots = 2,
                            .max_blocks_per_slot = 8},
                           nullptr, make)
               .value();
  const Block first = store_->Open(BlockId(1)).value();
  {
    const Block second = store_->Open(BlockId(2)).value();
    EXPECT_EQ(store_->Open(BlockId(3)).status(), absl::ResourceExhaustedError("it did not come"));
    EXPECT_TRUE(store_->CheckIntegrity().ok());
  }
  EXPECT_TRUE(store_->Open(BlockId(3)).ok());
}

TEST_F(KvStoreTest, RefusesSizesTooSmallForTwoBlocksAndNamesTheNeed) {
  KvStoreOptions options = {.shard = {.layout = kLayout},
                            .device_bytes = kLayout.block_bytes(),
                            .host_bytes = 100000,
                            .num_slots = 1,
                            .max_blocks_per_slot = 1,
                            .freed_memory = FreedMemory::kAsIs};
  absl::Status status = KvStore::Create(options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("4096 bytes; it was given 2048"));
  options.device_bytes = 2 * kLayout.block_bytes();
  options.host_bytes = kLayout.block_bytes();
  EXPECT_EQ(KvStore::Create(options).status().code(), absl::StatusCode::kResourceExhausted);
  options.host_bytes = 100000;
  options.device_bytes = int64_t{1} << 60;
  EXPECT_EQ(KvStore::Create(options).status().code(), absl::StatusCode::kResourceExhausted);
  options.shard.layout.head_dim = 0;
  EXPECT_EQ(KvStore::Create(options).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(KvStoreTest, ABlockNeverSealedGoesWithItsLastHandle) {
  Block block = store_->Open(BlockId(1)).value();
  EXPECT_EQ(store_->Open(BlockId(1)).status().code(), absl::StatusCode::kAlreadyExists);
  Block copy = block;
  block = Block();
  EXPECT_TRUE(store_->Holds(BlockId(1)));
  copy = Block();
  EXPECT_FALSE(store_->Holds(BlockId(1)));
  EXPECT_EQ(store_->Get(BlockId(1)).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(store_->stats().host_blocks_used, 0);
  EXPECT_EQ(store_->stats().device_pages_used, 0);
}

TEST_F(KvStoreTest, ASealedBlockIsKeptUntilDroppedAndReleased) {
  MakeSealed(1, 0, 0);
  store_->Unbind(0, 0);
  EXPECT_TRUE(store_->Holds(BlockId(1)));
  Block again = store_->Get(BlockId(1)).value();
  store_->Drop(BlockId(1));
  store_->Drop(BlockId(1));
  store_->Drop(BlockId(77));
  EXPECT_TRUE(store_->Holds(BlockId(1)));
  again = Block();
  EXPECT_FALSE(store_->Holds(BlockId(1)));
}

TEST_F(KvStoreTest, SealsOnceAndOnlyOpenBlocks) {
  const Block block = MakeSealed(1, 0, 0);
  EXPECT_EQ(store_->Seal(BlockId(1), Hash(1), kTokens).code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(store_->Seal(BlockId(2), Hash(2), kTokens).code(), absl::StatusCode::kNotFound);
}

TEST_F(KvStoreTest, OpenBlocksArePinnedInTheDeviceTier) {
  std::vector<Block> open;
  for (int64_t id = 0; id < 3; ++id) open.push_back(store_->Open(BlockId(id)).value());
  const absl::Status status = store_->Open(BlockId(3)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("device tier, 0 of 12"));
  ASSERT_TRUE(store_->Seal(BlockId(1), Hash(1), kTokens).ok());
  EXPECT_TRUE(store_->Open(BlockId(3)).ok());
}

TEST_F(KvStoreTest, OpenNeedsRoomInTheHostTier) {
  for (int64_t id = 0; id < 6; ++id) MakeSealed(id, 0, id);
  const absl::Status status = store_->Open(BlockId(6)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("host tier, 0 of 6 free"));
  store_->Unbind(0, 0);
  EXPECT_FALSE(store_->Open(BlockId(6)).ok());
  store_->Drop(BlockId(0));
  EXPECT_TRUE(store_->Open(BlockId(6)).ok());
}

TEST_F(KvStoreTest, EveryPageReadsTheSameFromEitherTier) {
  for (int64_t id = 1; id <= 6; ++id) MakeSealed(id, 0, id - 1);
  int64_t device_pages = 0;
  for (int64_t id = 1; id <= 6; ++id) {
    device_pages += DevicePages(id);
    EXPECT_EQ(Read(0, id - 1, 1), id);
  }
  EXPECT_EQ(device_pages, 12);
  EXPECT_GT(store_->stats().evictions, 0);
}

TEST_F(KvStoreTest, APageIsPromotedWhenItMissedAsMuchAsItsSize) {
  for (int64_t id = 1; id <= 4; ++id) MakeSealed(id, 0, id - 1);
  int64_t cold = 1;
  while (DevicePages(cold) > 0) ++cold;
  Read(0, cold - 1, kLayout.page_bytes() / 2);
  Read(0, cold - 1, kLayout.page_bytes() / 2);
  EXPECT_EQ(DevicePages(cold), 0);
  Read(0, cold - 1, kLayout.page_bytes() / 2);
  EXPECT_EQ(DevicePages(cold), 4);
  EXPECT_EQ(store_->stats().promotions, 4);
  EXPECT_EQ(store_->stats().bytes_host_to_device, kLayout.block_bytes());
  EXPECT_EQ(Read(0, cold - 1), cold);
}

TEST_F(KvStoreTest, APageReadInFullIsPromotedAtOnce) {
  for (int64_t id = 1; id <= 4; ++id) MakeSealed(id, 0, id - 1);
  int64_t cold = 1;
  while (DevicePages(cold) > 0) ++cold;
  Read(0, cold - 1);
  EXPECT_EQ(DevicePages(cold), 4);
}

TEST_F(KvStoreTest, MissesOfLongAgoAreForgotten) {
  for (int64_t id = 1; id <= 4; ++id) MakeSealed(id, 0, id - 1);
  int64_t cold = 1;
  while (DevicePages(cold) > 0) ++cold;
  for (int i = 0; i < 10; ++i) {
    Read(0, cold - 1, kLayout.page_bytes() / 2);
    for (int quiet = 0; quiet < 20; ++quiet) Read(0, cold == 4 ? 0 : 3, 0);
  }
  EXPECT_EQ(DevicePages(cold), 0);
}

TEST_F(KvStoreTest, PagesReadInThisStepAreNotVictimsOfItsPromotions) {
  for (int64_t id = 1; id <= 6; ++id) MakeSealed(id, 0, id - 1);
  const int64_t promotions = store_->stats().promotions;
  // Everything is read in full in each step: no eviction would help.
  for (int i = 0; i < 20; ++i) {
    const PagedKv kv = store_->BeginStep(++step_).value();
    for (int64_t index = 0; index < 6; ++index) {
      for (int64_t layer = 0; layer < 2; ++layer) {
        for (int64_t head = 0; head < 2; ++head) {
          kv.Read(0, index, layer, head, kLayout.page_bytes());
        }
      }
    }
    ASSERT_TRUE(store_->EndStep().ok());
  }
  EXPECT_EQ(store_->stats().promotions, promotions);
}

TEST_F(KvStoreTest, EvictsWhatWasNotReadLately) {
  MakeSealed(1, 0, 0);
  MakeSealed(2, 0, 1);
  MakeSealed(3, 0, 2);
  const Block a = store_->Open(BlockId(4)).value();  // the hand has seen all reads now
  Read(0, 2);
  Read(0, 1);
  const int64_t before = DevicePages(1) + DevicePages(2) + DevicePages(3);
  ASSERT_EQ(before, 8);
  Read(0, 1);
  const Block b = store_->Open(BlockId(5)).value();
  EXPECT_EQ(DevicePages(1), 0);
}

TEST_F(KvStoreTest, CountsAPageOncePerStepAsHitOrMiss) {
  for (int64_t id = 1; id <= 6; ++id) MakeSealed(id, 0, id - 1);
  const KvStoreStats before = store_->stats();
  int64_t in_device = 0;
  const PagedKv kv = store_->BeginStep(++step_).value();
  for (int64_t index = 0; index < 6; ++index) {
    for (int repeat = 0; repeat < 3; ++repeat) {
      const kernels::PageRef page = kv.Read(0, index, 1, 0, 8);
      if (repeat == 0) in_device += page.tier() == PageTier::kDevice ? 1 : 0;
    }
  }
  ASSERT_TRUE(store_->EndStep().ok());
  EXPECT_EQ(store_->stats().device_hits - before.device_hits, in_device);
  EXPECT_EQ(store_->stats().device_misses - before.device_misses, 6 - in_device);
}

TEST_F(KvStoreTest, ABitFlippedInTheHostTierIsFoundBeforeItsPageIsPromoted) {
  for (int64_t id = 1; id <= 6; ++id) MakeSealed(id, 0, id - 1);
  int64_t cold = 1;
  while (DevicePages(cold) > 0) ++cold;
  store_->Bind(1, 5, store_->Get(BlockId(cold)).value());
  {
    const PagedKv kv = store_->BeginStep(++step_).value();
    kv.Peek(0, cold - 1, 1, 0).page()[100] ^= std::byte{4};
    ASSERT_TRUE(store_->EndStep().ok());
  }
  EXPECT_THAT(store_->TakeCorrupt(), IsEmpty());
  Read(1, 5);
  const std::vector<CorruptBlock> corrupt = store_->TakeCorrupt();
  ASSERT_EQ(corrupt.size(), 1u);
  EXPECT_EQ(corrupt[0].id, BlockId(cold));
  EXPECT_THAT(corrupt[0].slots, ElementsAre(0, 1));
  EXPECT_EQ(corrupt[0].status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(corrupt[0].status.message()), HasSubstr("layer 1, KV head 0"));
  EXPECT_EQ(store_->stats().checksum_failures, 1);
  EXPECT_EQ(DevicePages(cold), 3);
  EXPECT_FALSE(store_->Holds(BlockId(cold)));
  EXPECT_FALSE(store_->Get(BlockId(cold)).ok());
  Read(1, 5);
  EXPECT_THAT(store_->TakeCorrupt(), IsEmpty());
  store_->Unbind(0, 0);
  EXPECT_EQ(store_->stats().host_blocks_used, 6);
  store_->Unbind(1, 0);
  EXPECT_EQ(store_->stats().host_blocks_used, 5);
}

TEST_F(KvStoreTest, HandlesThatGoDuringAStepFreeTheirBlockBehindIt) {
  Block block = store_->Open(BlockId(1)).value();
  ASSERT_TRUE(store_->BeginStep(++step_).ok());
  block = Block();
  EXPECT_EQ(store_->stats().device_pages_used, 4);
  ASSERT_TRUE(store_->EndStep().ok());
  EXPECT_EQ(store_->stats().device_pages_used, 0);
}

TEST_F(KvStoreTest, EndStepWithoutAStepIsAnError) {
  EXPECT_EQ(store_->EndStep().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(KvStoreTest, AForkSharesFullBlocks) {
  MakeSealed(1, 0, 0);
  store_->Bind(1, 0, store_->Get(BlockId(1)).value());
  store_->Unbind(0, 0);
  EXPECT_EQ(Read(1, 0), 1);
  EXPECT_EQ(store_->stats().host_blocks_used, 1);
}

// For ThreadSanitizer: kernels read on many threads, and the engine reads between steps.
TEST_F(KvStoreTest, ConcurrentReadersWithinAStepAreCountedInFull) {
  for (int64_t id = 1; id <= 6; ++id) MakeSealed(id, 0, id - 1);
  for (int i = 0; i < 50; ++i) {
    const PagedKv kv = store_->BeginStep(++step_).value();
    std::vector<std::thread> readers;
    std::atomic<int> wrong = 0;
    for (int64_t t = 0; t < 4; ++t) {
      readers.emplace_back([&kv, &wrong, t] {
        for (int64_t n = 0; n < 24; ++n) {
          const int64_t index = (n + t) % 6;
          const kernels::PageRef page = kv.Read(0, index, n % 2, n / 12, 256);
          if (page.page()[n] != static_cast<std::byte>(index + 1)) ++wrong;
        }
      });
    }
    for (std::thread& reader : readers) reader.join();
    ASSERT_EQ(wrong, 0);
    ASSERT_TRUE(store_->EndStep().ok());
    ASSERT_TRUE(store_->CheckIntegrity().ok());
  }
}

}  // namespace
}  // namespace kvasir::kvstore
