#include "worker/engine/kv_sizes.h"

#include <limits>

#include "gtest/gtest.h"

namespace kvasir::worker {
namespace {

constexpr int64_t kNoBound = std::numeric_limits<int64_t>::max();

KvSizes Choose(const KvSizeOptions& options, const MemoryLeft& left) {
  return ChooseKvSizes(options, left).value();
}

TEST(KvSizesTest, OnACpuTheTiersShareHalfOfWhatIsLeft) {
  const KvSizes sizes = Choose({.given = {}, .most = kNoBound}, {.host = 1000, .device = {}});
  EXPECT_EQ(sizes.device, 100);
  EXPECT_EQ(sizes.host, 400);
}

TEST(KvSizesTest, RanksOfAMachineShareIt) {
  const KvSizes sizes =
      Choose({.given = {}, .ranks_on_machine = 2, .most = kNoBound}, {.host = 1000, .device = {}});
  EXPECT_EQ(sizes.device, 50);
  EXPECT_EQ(sizes.host, 200);
}

TEST(KvSizesTest, ADeviceHasMemoryOfItsOwn) {
  const KvSizes sizes = Choose({.given = {}, .ranks_on_machine = 2, .most = kNoBound},
                               {.host = 1000, .device = 5000});
  EXPECT_EQ(sizes.device, 5000);
  EXPECT_EQ(sizes.host, 250);
}

TEST(KvSizesTest, ADeviceHasRoomForDigests) {
  KvSizeOptions options = {.given = {}, .most = kNoBound, .host_digests = 0.1, .other_digests = 30};
  EXPECT_EQ(Choose(options, {.host = 1000, .device = 5000}).device, 4920);
  options.given.host = 20'000;
  EXPECT_EQ(Choose(options, {.host = 1000, .device = 5000}).device, 2970);
  options.given.host = 60'000;
  const absl::Status none = ChooseKvSizes(options, {.host = 1000, .device = 5000}).status();
  EXPECT_EQ(none.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(none.message().find("lower --kv-host-size-gb"), none.message().npos) << none;
  options.given.device = 4000;
  EXPECT_EQ(Choose(options, {.host = 1000, .device = 5000}).device, 4000) << "given";
  options.given = {};
  EXPECT_EQ(Choose(options, {.host = 1000, .device = {}}).device, 100) << "on a CPU";
}

TEST(KvSizesTest, WhatIsGivenStays) {
  const KvSizes sizes =
      Choose({.given = {.device = 7, .host = 9}, .most = 1}, {.host = 1000, .device = {}});
  EXPECT_EQ(sizes.device, 7);
  EXPECT_EQ(sizes.host, 9);
  const KvSizes beside =
      Choose({.given = {.device = 300}, .most = kNoBound}, {.host = 1000, .device = {}});
  EXPECT_EQ(beside.host, 200);
  const KvSizes none =
      Choose({.given = {.device = 700}, .most = kNoBound}, {.host = 1000, .device = {}});
  EXPECT_EQ(none.host, 0);
}

TEST(KvSizesTest, NoTierIsLargerThanWhatIsOfUse) {
  const KvSizes sizes = Choose({.given = {}, .most = 60}, {.host = 1000, .device = 5000});
  EXPECT_EQ(sizes.device, 60);
  EXPECT_EQ(sizes.host, 60);
}

}  // namespace
}  // namespace kvasir::worker
