// The reference of the residency protocol: random use against a naive model, and its rules one by
// one. 1e7 operations of each shape, times KVASIR_TEST_SCALE.
#include "kernels/residency/residency.h"

#include <gtest/gtest.h>

#include "tests/support/iterations.h"
#include "tests/support/random_residency.h"

namespace kvasir::kernels {
namespace {

class RandomResidencyTest : public ::testing::TestWithParam<RandomResidencyOptions> {};

TEST_P(RandomResidencyTest, EveryReadGivesTheBytesThatWereWritten) {
  ResidencyOps reference;
  RandomResidency random(GetParam(), reference);
  const int64_t operations = testing::Iterations(10'000'000);
  while (random.operations() < operations) {
    random.Step();
    if (HasFatalFailure()) FAIL() << "operation " << random.operations();
  }
  const ResidencyCounters& counters = random.counters();
  EXPECT_GT(counters.hits, operations / 100);
  EXPECT_GT(counters.misses, operations / 100);
  EXPECT_GT(counters.promotions, operations / 1000);
  EXPECT_GT(counters.evictions, operations / 200);
  EXPECT_GT(counters.given_up, operations / 100000);
  EXPECT_GT(random.promotions(), 100);
  random.FreeAll();
}

INSTANTIATE_TEST_SUITE_P(Shapes, RandomResidencyTest,
                         ::testing::Values(RandomResidencyOptions{.seed = 1,
                                                                  .num_extents = 9,
                                                                  .pages_per_extent = 4,
                                                                  .num_slots = 8,
                                                                  .max_fills = 1,
                                                                  .max_examined = 3,
                                                                  .reads = 20},
                                           RandomResidencyOptions{.seed = 2,
                                                                  .num_extents = 12,
                                                                  .pages_per_extent = 3,
                                                                  .num_slots = 20,
                                                                  .max_fills = 4,
                                                                  .max_examined = 60,
                                                                  .reads = 40},
                                           RandomResidencyOptions{.seed = 3,
                                                                  .num_extents = 30,
                                                                  .pages_per_extent = 6,
                                                                  .num_slots = 70,
                                                                  .max_fills = 16,
                                                                  .max_examined = 50,
                                                                  .reads = 120},
                                           RandomResidencyOptions{.seed = 4,
                                                                  .num_extents = 60,
                                                                  .pages_per_extent = 90,
                                                                  .num_slots = 1500,
                                                                  .max_fills = 200,
                                                                  .max_examined = 400,
                                                                  .reads = 6000}));

// Three extents of two pages over four slots, one fill a step, unless told otherwise.
class ResidencyTest : public ::testing::Test {
 protected:
  static constexpr int64_t kPageBytes = 64;

  ResidencyTest() { Init(2); }
  void Init(int64_t pages_per_extent) {
    arena_ = HostBuffer::Allocate(2 * pages_per_extent * kPageBytes).value();
    extents_ = HostBuffer::Allocate(3 * pages_per_extent * kPageBytes).value();
    const ResidencyShape shape = {.num_extents = 3,
                                  .pages_per_extent = pages_per_extent,
                                  .num_slots = 2 * pages_per_extent,
                                  .page_bytes = kPageBytes,
                                  .arena = arena_.data(),
                                  .extents = extents_.data(),
                                  .extent_stride = pages_per_extent * kPageBytes,
                                  .max_fills = 1,
                                  .max_examined = 4};
    memory_ = HostBuffer::Allocate(LayOutResidency(shape, nullptr).bytes).value();
    s_ = LayOutResidency(shape, memory_.data());
    InitResidency(s_);
  }
  void Open(int32_t extent) { OpenExtents(s_, {&extent, 1}); }
  void Seal(int32_t extent) {
    CopyExtentsToHost(s_, {&extent, 1});
    SealExtents(s_, {&extent, 1});
  }
  void Free(int32_t extent) { FreeExtents(s_, {&extent, 1}); }
  // Reads `bytes` bytes of each page in a new step. Returns the number of pages that get filled.
  int64_t Step(std::initializer_list<int64_t> pages, uint32_t bytes = kPageBytes) {
    ++step_;
    for (const int64_t page : pages) {
      s_.last_touched[page] = step_;
      if (s_.pages[page].tier() == PageTier::kHost) s_.missed_bytes[page] += bytes;
    }
    CopyFills(s_);
    MapFills(s_);
    PlanFills(s_, step_);
    return s_.counters->num_fills;
  }
  bool InDevice(int64_t page) const { return s_.pages[page].tier() == PageTier::kDevice; }
  // Pages 0 and 1 in the host tier, 2 to 5 in the device tier, all sealed.
  void SealThree() {
    for (int32_t extent = 0; extent < 3; ++extent) {
      Open(extent);
      Seal(extent);
    }
    ASSERT_FALSE(InDevice(0) || InDevice(1));
  }

  HostBuffer arena_, extents_, memory_;
  ResidencyState s_;
  uint32_t step_ = 0;
};

TEST_F(ResidencyTest, APageIsFilledWhenItMissedAsMuchAsItsSizeAndMappedAStepLater) {
  SealThree();
  EXPECT_EQ(Step({0}), 1) << "one read of the whole page";
  EXPECT_FALSE(InDevice(0)) << "it is being filled";
  EXPECT_EQ(s_.slot_states[s_.fills[0].slot], SlotState::kFilling);
  Step({});
  EXPECT_TRUE(InDevice(0));
  EXPECT_EQ(s_.counters->promotions, 1);
}

TEST_F(ResidencyTest, MissesOfAFewStepsAddUp) {
  SealThree();
  EXPECT_EQ(Step({0}, kPageBytes - 1), 0);
  EXPECT_EQ(Step({0}, kPageBytes / 8 - 1), 0) << "of 63 bytes 56 count still, so it misses one";
  EXPECT_EQ(Step({0}, kPageBytes / 8), 1);
}

TEST_F(ResidencyTest, MissesAreForgotten) {
  SealThree();
  for (int i = 0; i < 100; ++i) EXPECT_EQ(Step({0}, kPageBytes / 10), 0);
}

TEST_F(ResidencyTest, WhatTheStepReadAndWhatIsOpenStays) {
  SealThree();
  EXPECT_EQ(Step({0, 2, 3, 4, 5}), 0) << "every page was needed";
  EXPECT_EQ(Step({0, 2, 3, 5}), 0) << "page 4 has a second chance";
  EXPECT_EQ(Step({0, 2, 3, 5}), 1);
  Step({});
  EXPECT_FALSE(InDevice(4));
  Free(1);
  Free(2);
  Open(1);
  EXPECT_TRUE(InDevice(0));
  Open(2);
  EXPECT_FALSE(InDevice(0)) << "it was all that could leave";
  EXPECT_EQ(Step({0}), 0) << "open pages stay";
}

TEST_F(ResidencyTest, ChunksTakeTurns) {
  Init(2 * kChunkPages);
  SealThree();
  const int64_t far = kChunkPages;
  for (const int64_t expected : {int64_t{0}, far, int64_t{1}, far + 1}) {
    EXPECT_EQ(Step({0, 1, far, far + 1}), 1);
    EXPECT_EQ(s_.fills[0].page, expected);
  }
}

TEST_F(ResidencyTest, ExtentsArePromotedBeforeAStep) {
  SealThree();
  // Returns the number of pages that came.
  std::vector<uint8_t> running = {1, 1, 1};
  const auto promote = [&](std::initializer_list<int32_t> extents) {
    const int64_t before = s_.counters->promotions;
    PlanPromotion(s_, {extents.begin(), extents.size()}, running, step_ + 1);
    CopyFills(s_);
    MapFills(s_);
    return s_.counters->promotions - before;
  };
  Step({});
  MapFills(s_);
  EXPECT_EQ(promote({0}), 2) << "no step has read the others";
  EXPECT_TRUE(InDevice(0) && InDevice(1));
  EXPECT_EQ(promote({0}), 0) << "it is there";
  // One extent is in the host tier. The others are read in every step, or were promoted.
  const int32_t absent = InDevice(2) ? 2 : 1;
  const int64_t other = absent == 2 ? 2 : 4;
  for (uint32_t i = 0; i < kRecentSteps; ++i) Step({0, 1, other, other + 1});
  EXPECT_EQ(promote({absent}), 0) << "every other page is read in each step";
  for (uint32_t i = 1; i < kRecentSteps; ++i) Step({0, 1});
  EXPECT_EQ(promote({absent}), 0) << "it was read a few steps ago";
  Step({0, 1});
  EXPECT_EQ(promote({absent}), 2) << "that was long ago";
  EXPECT_TRUE(InDevice(0) && InDevice(1) && !InDevice(other) && !InDevice(other + 1));
  EXPECT_EQ(promote({0, 1, 2}), 0) << "more than there is room for, and nothing may leave";
  Step({0, 1});
  running[0] = 0;
  EXPECT_EQ(promote({1, 2}), 2) << "its sequence has ended";
  EXPECT_FALSE(InDevice(0) || InDevice(1));
}

TEST_F(ResidencyTest, AsManyPagesArePromotedAsThereAreSlots) {
  const std::vector<int32_t> extents = {2, 0, 1};
  RestoreExtents(s_, extents);
  PlanPromotion(s_, extents, std::vector<uint8_t>(3, 1), /*step=*/1);
  ASSERT_EQ(s_.counters->num_fills, 4) << "of six pages";
  for (int64_t i = 0; i < 4; ++i) {
    EXPECT_EQ(s_.fills[i].page, (std::vector<int32_t>{4, 5, 0, 1})[static_cast<size_t>(i)]);
  }
}

TEST_F(ResidencyTest, AFillWhoseRowIsFreedIsGivenUp) {
  SealThree();
  ASSERT_EQ(Step({0}), 1);
  Free(0);
  Open(0);  // the same pages now hold another block; one slot is not free yet
  EXPECT_EQ(s_.counters->without_room, 0);
  Step({});
  EXPECT_EQ(s_.counters->given_up, 1);
  EXPECT_EQ(s_.counters->promotions, 0);
  EXPECT_EQ(s_.counters->free_slots, 1);
}

TEST_F(ResidencyTest, RowsWithoutRoomAreCountedAndStayAbsent) {
  Open(0);
  Open(1);
  Open(2);
  EXPECT_EQ(s_.counters->without_room, 2);
  EXPECT_EQ(s_.pages[4].tier(), PageTier::kAbsent);
}

TEST(ResidencyShapeTest, RefusesWhatDoesNotFitItsTables) {
  const ResidencyShape good = {.num_extents = 3,
                               .pages_per_extent = 2,
                               .num_slots = 4,
                               .page_bytes = 64,
                               .max_fills = 1,
                               .max_examined = 1};
  EXPECT_TRUE(CheckResidencyShape(good).ok());
  const auto refuses = [&](auto&& change) {
    ResidencyShape shape = good;
    change(shape);
    return CheckResidencyShape(shape).code() == absl::StatusCode::kInvalidArgument;
  };
  EXPECT_TRUE(refuses([](auto& s) { s.num_extents = int64_t{1} << 30; }));
  EXPECT_TRUE(refuses([](auto& s) { s.num_slots = 3; }));
  EXPECT_TRUE(refuses([](auto& s) { s.max_fills = 3; }));
  EXPECT_TRUE(refuses([](auto& s) { s.page_bytes = 72; }));
  EXPECT_TRUE(refuses([](auto& s) { s.max_examined = 0; }));
}

}  // namespace
}  // namespace kvasir::kernels
