#include "worker/engine/kv_sizes.h"

#include <limits>

#include "gtest/gtest.h"

namespace kvasir::worker {
namespace {

constexpr int64_t kNoBound = std::numeric_limits<int64_t>::max();

TEST(KvSizesTest, OnACpuTheTiersShareHalfOfWhatIsLeft) {
  const KvSizes sizes =
      ChooseKvSizes({.given = {}, .most = kNoBound}, {.host = 1000, .device = {}});
  EXPECT_EQ(sizes.device, 100);
  EXPECT_EQ(sizes.host, 400);
}

TEST(KvSizesTest, RanksOfAMachineShareIt) {
  const KvSizes sizes = ChooseKvSizes({.given = {}, .ranks_on_machine = 2, .most = kNoBound},
                                      {.host = 1000, .device = {}});
  EXPECT_EQ(sizes.device, 50);
  EXPECT_EQ(sizes.host, 200);
}

TEST(KvSizesTest, ADeviceHasMemoryOfItsOwn) {
  const KvSizes sizes = ChooseKvSizes({.given = {}, .ranks_on_machine = 2, .most = kNoBound},
                                      {.host = 1000, .device = 5000});
  EXPECT_EQ(sizes.device, 5000);
  EXPECT_EQ(sizes.host, 250);
}

TEST(KvSizesTest, WhatIsGivenStays) {
  const KvSizes sizes =
      ChooseKvSizes({.given = {.device = 7, .host = 9}, .most = 1}, {.host = 1000, .device = {}});
  EXPECT_EQ(sizes.device, 7);
  EXPECT_EQ(sizes.host, 9);
  const KvSizes beside =
      ChooseKvSizes({.given = {.device = 300}, .most = kNoBound}, {.host = 1000, .device = {}});
  EXPECT_EQ(beside.host, 200);
  const KvSizes none =
      ChooseKvSizes({.given = {.device = 700}, .most = kNoBound}, {.host = 1000, .device = {}});
  EXPECT_EQ(none.host, 0);
}

TEST(KvSizesTest, NoTierIsLargerThanWhatIsOfUse) {
  const KvSizes sizes = ChooseKvSizes({.given = {}, .most = 60}, {.host = 1000, .device = 5000});
  EXPECT_EQ(sizes.device, 60);
  EXPECT_EQ(sizes.host, 60);
}

}  // namespace
}  // namespace kvasir::worker
