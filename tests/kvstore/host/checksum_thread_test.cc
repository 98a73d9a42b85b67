// Checksums that are made beside: those of the format, for many blocks that come and go.
#include "kvstore/host/checksum_thread.h"

#include <algorithm>
#include <chrono>
#include <gtest/gtest.h>
#include <random>
#include <thread>
#include <vector>

#include "kernels/base/buffer.h"
#include "tests/kvstore/test_blocks.h"

namespace kvasir::kvstore {
namespace {

constexpr int64_t kExtents = 8;
const ExtentFormat kFormat = ExtentFormat::Create(SmallShard()).value();

class ChecksumThreadTest : public ::testing::Test {
 protected:
  // Puts the pages of the block `name` into the extent, and no checksums.
  PrefixHash Fill(int64_t extent, uint32_t name) {
    const TestBlock block(kFormat, name, 1);
    std::copy(block.extent.begin(), block.extent.end(), slab_.extent(extent).begin());
    std::ranges::fill(slab_.checksums(extent), 0);
    return block.identity.hash;
  }
  void ExpectChecksums(int64_t extent, uint32_t name) {
    while (!thread_.IsDone(extent)) std::this_thread::sleep_for(std::chrono::microseconds(50));
    const TestBlock block(kFormat, name, 1);
    const auto begin = static_cast<size_t>(kFormat.checksums_offset());
    const auto bytes = static_cast<size_t>(kFormat.shard().layout.pages_per_block()) * 8;
    EXPECT_EQ(std::memcmp(slab_.extent(extent).data() + begin, block.extent.data() + begin, bytes),
              0);
  }

  const kernels::HostBuffer memory_ =
      kernels::HostBuffer::Allocate((kExtents + 1) * kFormat.extent_bytes()).value();
  HostSlab slab_{kFormat, kExtents, FreedMemory::kAsIs, Aligned(memory_.data())};
  ChecksumThread thread_{kFormat, slab_};

 private:
  static std::byte* Aligned(std::byte* memory) {
    return memory + -reinterpret_cast<uintptr_t>(memory) % kExtentAlignment;
  }
};

TEST_F(ChecksumThreadTest, ChecksumsAreThoseOfTheFormat) {
  for (int64_t extent = 0; extent < kExtents; ++extent) {
    EXPECT_FALSE(thread_.IsDone(extent));
    thread_.Begin(extent, Fill(extent, static_cast<uint32_t>(extent)));
  }
  for (int64_t extent = 0; extent < kExtents; ++extent) {
    ExpectChecksums(extent, static_cast<uint32_t>(extent));
  }
}

// A forgotten block's checksums are written into no other block, and its end is not taken for
// another's.
TEST_F(ChecksumThreadTest, BlocksThatGoBeforeTheirEndLeaveNothing) {
  std::mt19937 random(3);
  std::vector<uint32_t> names(kExtents, 0);
  for (uint32_t name = 1; name <= 3000; ++name) {
    const auto extent = static_cast<int64_t>(random() % kExtents);
    uint32_t& held = names[static_cast<size_t>(extent)];
    if (held != 0 && random() % 4 == 0) ExpectChecksums(extent, held);
    if (held != 0) thread_.Forget(extent);
    EXPECT_FALSE(thread_.IsDone(extent));
    held = name;
    thread_.Begin(extent, Fill(extent, name));
  }
  for (int64_t extent = 0; extent < kExtents; ++extent) {
    if (const uint32_t held = names[static_cast<size_t>(extent)]; held != 0) {
      ExpectChecksums(extent, held);
    }
  }
}

}  // namespace
}  // namespace kvasir::kvstore
