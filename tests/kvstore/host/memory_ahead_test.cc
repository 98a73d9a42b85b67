// Memory of the host tier that is taken before blocks need it: how much, and beside those who take
// extents themselves.
#include "kvstore/host/memory_ahead.h"

#include <chrono>
#include <gtest/gtest.h>
#include <memory>
#include <thread>

#include "kvstore/kv_store.h"
#include "tests/kvstore/test_blocks.h"

namespace kvasir::kvstore {
namespace {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;

// 2 MiB a block.
KvShard LargeShard() {
  KvShard shard = SmallShard();
  shard.layout.num_layers = 32;
  shard.layout.head_dim = 128;
  return shard;
}

const ExtentFormat kFormat = ExtentFormat::Create(LargeShard()).value();

// Taken ahead of the first block.
const int64_t kLeast = MemoryAhead::kLeastBytes / kFormat.extent_bytes();

class MemoryAheadTest : public ::testing::Test {
 protected:
  static constexpr int64_t kExtents = 100;

  MemoryAheadTest() { EXPECT_EQ(memory_->Fit(kFormat, "", kExtents), absl::OkStatus()); }

  // Number of whole extents for which there is memory, once there is for `least` or after a while.
  int64_t HeldExtents(int64_t least, std::chrono::milliseconds patience = 20s) const {
    const auto deadline = std::chrono::steady_clock::now() + patience;
    while (memory_->held_bytes() < least * kFormat.extent_bytes() &&
           std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return memory_->held_bytes() / kFormat.extent_bytes();
  }

  const std::unique_ptr<HostMemory> memory_ = HostMemory::Open("").value();
};

TEST_F(MemoryAheadTest, TakesAFewExtentsAtFirstAndThenAsManyAsWereTaken) {
  ASSERT_LT(kLeast, 40);
  ASSERT_EQ(HeldExtents(0), 0);
  {
    MemoryAhead ahead(*memory_, kExtents);
    ahead.OnTaken(0);
    EXPECT_EQ(HeldExtents(kLeast + 1), kLeast + 1);
    for (int64_t extent = 1; extent < 40; ++extent) ahead.OnTaken(extent);
    EXPECT_EQ(HeldExtents(80), 80);
    EXPECT_EQ(HeldExtents(81, 50ms), 80);
    ahead.OnTaken(3);  // given back and taken again
  }
  EXPECT_EQ(HeldExtents(0), 80);
  MemoryAhead ahead(*memory_, kExtents);
  for (int64_t extent = 0; extent < kExtents; ++extent) ahead.OnTaken(extent);
  EXPECT_EQ(HeldExtents(kExtents), kExtents);
}

TEST_F(MemoryAheadTest, OthersReserveTheSameExtents) {
  MemoryAhead ahead(*memory_, kExtents);
  for (int64_t extent = 0; extent < kExtents; ++extent) {
    ahead.OnTaken(extent);
    ASSERT_EQ(memory_->Reserve(extent), absl::OkStatus());
    ASSERT_GE(memory_->held_bytes(), (extent + 1) * kFormat.extent_bytes());
    std::byte* const bytes = memory_->extents() + extent * kFormat.extent_bytes();
    for (const int64_t at : {int64_t{0}, kFormat.extent_bytes() - 1}) {
      ASSERT_EQ(bytes[at], std::byte{0}) << extent;
      bytes[at] = std::byte{9};
    }
  }
  for (int64_t extent = 0; extent < kExtents; ++extent) {
    EXPECT_EQ(memory_->extents()[extent * kFormat.extent_bytes()], std::byte{9}) << extent;
  }
}

TEST_F(MemoryAheadTest, AStoreThatOpensABlockHasMemoryForMore) {
  const auto store = KvStore::Create({.shard = LargeShard(),
                                      .device_bytes = 3 * LargeShard().layout.block_bytes(),
                                      .host_bytes = kExtents * kFormat.extent_bytes(),
                                      .num_slots = 1,
                                      .max_blocks_per_slot = 16,
                                      .memory = memory_.get(),
                                      .owner = ""},
                                     nullptr)
                         .value();
  ASSERT_EQ(HeldExtents(0), 0);
  const Block block = store->Open(BlockId(1)).value();
  EXPECT_GE(HeldExtents(kLeast), kLeast);
}

}  // namespace
}  // namespace kvasir::kvstore
