#include "kvstore/tiers/device_arena.h"

#include <gtest/gtest.h>

namespace kvasir::kvstore {
namespace {

constexpr int64_t kPageBytes = 64;

DeviceArena MakeArena(int64_t num_slots, FreedMemory freed) {
  return DeviceArena(kernels::HostBuffer::Allocate(num_slots * kPageBytes).value(), num_slots,
                     kPageBytes, freed);
}

TEST(DeviceArena, VictimsAreNeitherPinnedNorSpared) {
  DeviceArena arena = MakeArena(3, FreedMemory::kAsIs);
  uint32_t last_touched[] = {5, 6, 7};
  for (int64_t page = 0; page < 3; ++page) arena.Take(page);
  EXPECT_FALSE(arena.FindVictim(last_touched, std::nullopt).has_value());
  arena.Unpin(2);
  EXPECT_FALSE(arena.FindVictim(last_touched, 7).has_value());
  EXPECT_EQ(arena.FindVictim(last_touched, std::nullopt), 2);
}

TEST(DeviceArena, APageReadSinceTheLastRoundGetsASecondChance) {
  DeviceArena arena = MakeArena(3, FreedMemory::kAsIs);
  uint32_t last_touched[] = {1, kNeverTouched, 1};
  for (int64_t page = 0; page < 3; ++page) arena.Unpin(arena.Take(page));
  EXPECT_EQ(arena.FindVictim(last_touched, std::nullopt), 1) << "0 was read, 1 never";
  EXPECT_EQ(arena.FindVictim(last_touched, std::nullopt), 0) << "2 was read, 0 not again";
  last_touched[1] = last_touched[2] = 2;
  EXPECT_EQ(arena.FindVictim(last_touched, std::nullopt), 0);
  last_touched[0] = 3;
  EXPECT_EQ(arena.FindVictim(last_touched, std::nullopt), 1);
}

TEST(DeviceArena, FreedSlotsAreReusedAndPoisoned) {
  DeviceArena arena = MakeArena(1, FreedMemory::kPoisoned);
  const int64_t slot = arena.Take(8);
  EXPECT_EQ(arena.page(slot), 8);
  EXPECT_EQ(arena.num_free(), 0);
  arena.Free(slot);
  EXPECT_EQ(arena.num_pinned(), 0);
  EXPECT_EQ(arena.Take(9), slot);
  for (int i = 0; i < 64; ++i) EXPECT_EQ(arena.page_memory(slot)[i], std::byte{0xff});
  EXPECT_TRUE(arena.CheckIntegrity().ok());
}

}  // namespace
}  // namespace kvasir::kvstore
