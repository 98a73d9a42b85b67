// Blocks that come from the tier below while the memory of the host tier is still being taken from
// the system: they wait for theirs, and steps do not wait for them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <memory>
#include <sys/mman.h>
#include <utility>

#include "kvstore/host/host_slab.h"
#include "kvstore/tiers/arena_residency.h"
#include "tests/kvstore/forwarding_residency.h"
#include "tests/kvstore/store_user.h"
#include "tests/kvstore/test_blocks.h"
#include "tests/support/memory_tier.h"

namespace kvasir::kvstore {
namespace {

using ::testing::IsEmpty;

constexpr int64_t kExtent = 12288;
constexpr int64_t kExtents = 9;

// Extents from `first_absent` on may not be touched yet. Whoever waits for one gets it at once, and
// is counted.
class LateMemory final : public ForwardingResidency {
 public:
  using ForwardingResidency::ForwardingResidency;

  bool IsExtentThere(int64_t extent) override { return extent < first_absent; }
  absl::Status AwaitExtent(int64_t extent) override {
    waits += IsExtentThere(extent) ? 0 : 1;
    return absl::OkStatus();
  }

  int64_t first_absent = kExtents;
  int64_t waits = 0;
};

class LateMemoryTest : public ::testing::Test, protected StoreUser {
 protected:
  LateMemoryTest() {
    const auto make = [this](const ResidencyOptions& options) {
      auto late = std::make_unique<LateMemory>(ArenaResidency::Make(options).value());
      memory_ = late.get();
      return absl::StatusOr<std::unique_ptr<PageResidency>>(std::move(late));
    };
    store_ = KvStore::Create({.shard = SmallShard(),
                              .device_bytes = 3 * SmallShard().layout.block_bytes(),
                              .host_bytes = kExtents * kExtent,
                              .num_slots = 1,
                              .max_blocks_per_slot = 16},
                             std::make_unique<MemoryTier>(
                                 ExtentFormat::Create(SmallShard()).value(), /*seed=*/1),
                             make)
                 .value();
    MakeSealed(1, 100);
    store_->Persist(BlockId(1), TokensOf(100));
    Flush();
    memory_->first_absent = 1;  // the block's own is there
  }
  ~LateMemoryTest() override { EXPECT_EQ(store_->CheckIntegrity(), absl::OkStatus()); }

  void PollOften() {
    for (int i = 0; i < 1000; ++i) store_->PollTier();
  }

  LateMemory* memory_ = nullptr;
};

TEST_F(LateMemoryTest, ARestoreWaitsForItsMemoryAndNobodyForTheRestore) {
  ASSERT_EQ(store_->Restore(BlockId(2), HashOf(100)), absl::OkStatus());
  PollOften();
  EXPECT_TRUE(store_->TierIsBusy());
  EXPECT_THAT(store_->TakeRestored(), IsEmpty());
  EXPECT_EQ(memory_->waits, 0);

  MakeSealed(3, 101);  // what a step computes has its memory at once
  EXPECT_EQ(memory_->waits, 1);
  ExpectHolds(3, 101);
  EXPECT_THAT(store_->TakeRestored(), IsEmpty());

  memory_->first_absent = kExtents;
  while (store_->TierIsBusy()) store_->PollTier();
  ASSERT_EQ(store_->TakeRestored().size(), 1);
  EXPECT_EQ(memory_->waits, 1);
  ExpectHolds(2, 100);
}

TEST_F(LateMemoryTest, ARestoreThatIsDroppedWhileItWaitsLeavesItsRoom) {
  ASSERT_EQ(store_->Restore(BlockId(2), HashOf(100)), absl::OkStatus());
  PollOften();
  EXPECT_EQ(store_->stats().host_blocks_used, 2);
  store_->Drop(BlockId(2));
  EXPECT_EQ(store_->stats().host_blocks_used, 1);
  memory_->first_absent = kExtents;
  EXPECT_EQ(Restore(3, 100), absl::OkStatus());
  ExpectHolds(3, 100);
}

TEST(HostSlabTest, AnExtentThatIsFreedUntouchedNeedsNoMemory) {
  const ExtentFormat format = ExtentFormat::Create(SmallShard()).value();
  const auto bytes = static_cast<size_t>(2 * format.extent_bytes());
  void* const none = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(none, MAP_FAILED);
  {
    HostSlab slab(format, 2, FreedMemory::kAsIs, static_cast<std::byte*>(none));
    const int64_t taken = slab.Take();
    slab.FreeUntouched(taken);
    EXPECT_EQ(slab.num_free(), 2);
    EXPECT_FALSE(slab.is_stale(taken));
    EXPECT_EQ(slab.Take(), taken);
  }
  munmap(none, bytes);
}

}  // namespace
}  // namespace kvasir::kvstore
