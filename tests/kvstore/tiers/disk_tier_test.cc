#include "kvstore/tiers/disk_tier.h"

#include <filesystem>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <string>
#include <utility>
#include <vector>

#include "tests/kvstore/test_blocks.h"
#include "tests/kvstore/tiers/disk_tier_fixture.h"

namespace kvasir::kvstore {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

TEST_F(DiskTierTest, GivesBackWhatWasWritten) {
  ASSERT_TRUE(store_.Open().ok());
  for (uint32_t name = 1; name <= 10; ++name) EXPECT_TRUE(store_.Write(name).ok());
  for (uint32_t name = 1; name <= 10; ++name) EXPECT_TRUE(store_.Read(name).ok());
  EXPECT_EQ(store_.Read(11).code(), absl::StatusCode::kNotFound);
  const TierStats stats = store_.tier->stats();
  EXPECT_EQ(stats.blocks, 10);
  EXPECT_EQ(stats.written_blocks, 10);
  EXPECT_EQ(stats.written_bytes, 10 * store_.format.extent_bytes());
  EXPECT_EQ(stats.read_blocks, 10);
  EXPECT_TRUE(stats.writable);
}

TEST_F(DiskTierTest, ABatchIsWrittenInGroupsAndABlockOnce) {
  ASSERT_TRUE(store_.Open().ok());
  std::vector<TestBlock> blocks;
  std::vector<TierWrite> writes;
  for (uint32_t i = 0; i < 20; ++i) blocks.emplace_back(store_.format, i % 15, 1);
  for (const TestBlock& block : blocks) {
    writes.push_back({.ticket = uint64_t{1000} + block.identity.hash[0],
                      .block = block.identity,
                      .extent = block.extent});
  }
  store_.tier->Write(writes);
  size_t completed = 0;
  while (completed < 20) {
    store_.tier->Wait();
    for (const TierCompletion& completion : store_.tier->Poll().completions) {
      EXPECT_TRUE(completion.status.ok());
      ++completed;
    }
  }
  EXPECT_EQ(store_.tier->stats().written_blocks, 15);
  for (uint32_t name = 0; name < 15; ++name) EXPECT_TRUE(store_.Read(name).ok());
}

TEST_F(DiskTierTest, WaitReturnsWhenNothingIsUnderWay) {
  ASSERT_TRUE(store_.Open().ok());
  store_.tier->Wait();
  EXPECT_THAT(store_.tier->Poll().completions, IsEmpty());
}

TEST_F(DiskTierTest, HoldsItsBlocksOverRestartsAndNewGenerationsAreAboveOldOnes) {
  ASSERT_TRUE(store_.Open().ok());
  const uint64_t generation = store_.tier->first_generation();
  for (uint32_t name = 1; name <= 9; ++name) EXPECT_TRUE(store_.Write(name).ok());
  for (int restart = 0; restart < 3; ++restart) {
    ASSERT_TRUE(store_.Open().ok());
    EXPECT_THAT(store_.Names(), ElementsAre(1, 2, 3, 4, 5, 6, 7, 8, 9));
    EXPECT_GE(store_.tier->first_generation(), generation + (uint64_t{1} << 32));
    for (uint32_t name = 1; name <= 9; ++name) EXPECT_TRUE(store_.Read(name).ok());
  }
}

TEST_F(DiskTierTest, EvictsTheLeastRecentlyUsedAndGivesTheirSpaceBack) {
  ASSERT_TRUE(store_.Open(/*capacity_blocks=*/6).ok());
  for (uint32_t name = 1; name <= 6; ++name) EXPECT_TRUE(store_.Write(name).ok());
  EXPECT_TRUE(store_.Read(1).ok());
  EXPECT_TRUE(store_.Write(2).ok());  // stored already: counts as a use
  for (uint32_t name = 7; name <= 8; ++name) EXPECT_TRUE(store_.Write(name).ok());
  EXPECT_THAT(store_.Names(), ElementsAre(1, 2, 5, 6, 7, 8));
  EXPECT_THAT(store_.forgotten, UnorderedElementsAre(HashOf(3), HashOf(4)));
  EXPECT_EQ(store_.tier->stats().evictions, 2);
  for (uint32_t name = 9; name <= 40; ++name) EXPECT_TRUE(store_.Write(name).ok());
  EXPECT_THAT(store_.Names(), ElementsAre(35, 36, 37, 38, 39, 40));
  EXPECT_LE(DiskBytes(), 6 * store_.format.extent_bytes());
  EXPECT_LE(Segments().size(), 3u);
}

TEST_F(DiskTierTest, TheOrderOfUseOutlivesARestart) {
  ASSERT_TRUE(store_.Open(6).ok());
  for (uint32_t name = 1; name <= 6; ++name) EXPECT_TRUE(store_.Write(name).ok());
  EXPECT_TRUE(store_.Read(1).ok());
  ASSERT_TRUE(store_.Open(6).ok());
  EXPECT_TRUE(store_.Write(7).ok());
  EXPECT_THAT(store_.Names(), ElementsAre(1, 3, 4, 5, 6, 7));
}

TEST_F(DiskTierTest, WithoutHolesSpaceComesBackWithWholeSegments) {
  store_.control->Set({.no_holes = true});
  ASSERT_TRUE(store_.Open(8).ok());
  for (uint32_t name = 1; name <= 60; ++name) {
    ASSERT_TRUE(store_.Write(name).ok()) << name;
    ASSERT_LE(DiskBytes(), 8 * store_.format.extent_bytes());
  }
  EXPECT_TRUE(store_.Read(60).ok());
  EXPECT_GE(store_.tier->stats().blocks, 4);
}

TEST_F(DiskTierTest, ASmallerCapacityEvictsAtTheNextWrite) {
  ASSERT_TRUE(store_.Open(20).ok());
  for (uint32_t name = 1; name <= 20; ++name) EXPECT_TRUE(store_.Write(name).ok());
  ASSERT_TRUE(store_.Open(4).ok());
  EXPECT_TRUE(store_.Write(21).ok());
  EXPECT_THAT(store_.Names(), ElementsAre(18, 19, 20, 21));
  EXPECT_EQ(OpenDiskTier(store_.Options(0)).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(DiskTierTest, ASecondOwnerIsRefusedAndToldWhoHasIt) {
  ASSERT_TRUE(store_.Open().ok());
  EXPECT_TRUE(store_.Write(1).ok());
  TestStore second(directory_);
  const absl::Status status = second.Open();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(
      std::string(status.message()),
      HasSubstr("locked by process " + std::to_string(::getpid()) + "; kv_disk_path must be"));
  EXPECT_TRUE(store_.Read(1).ok());
  store_.Close();
  EXPECT_TRUE(second.Open().ok());
}

// The message told to give each worker a folder of its own, whatever was wrong with this one.
TEST_F(DiskTierTest, AFolderThatTakesNoLockIsRefusedWithBothReasons) {
  std::filesystem::create_directories(directory_ + "/LOCK");
  const absl::Status status = store_.Open();
  EXPECT_FALSE(status.ok());
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("that this user may write and that no other process has open"));
}

TEST_F(DiskTierTest, AStoreOfAnotherModelIsRefusedAndLeftAlone) {
  ASSERT_TRUE(store_.Open().ok());
  EXPECT_TRUE(store_.Write(1).ok());
  store_.Close();
  for (const bool manifest_lost : {false, true}) {
    if (manifest_lost) WriteFile(directory_ + "/manifest/CURRENT", "damage");
    for (int part = 0; part < 3; ++part) {
      DiskTierOptions options = store_.Options(100);
      if (part == 0) options.shard.weights_hash[5] = 'x';
      if (part == 1) options.shard.first_head = 2;
      if (part == 2) options.shard.layout.num_layers = 4;  // longer extents too
      const absl::Status status = OpenDiskTier(std::move(options)).status();
      EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr("weights 77777777"));
    }
  }
  ASSERT_TRUE(store_.Open().ok());
  EXPECT_TRUE(store_.Read(1).ok());
}

TEST_F(DiskTierTest, ALostManifestIsMadeAnewFromTheExtents) {
  ASSERT_TRUE(store_.Open().ok());
  for (uint32_t name = 1; name <= 11; ++name) ASSERT_TRUE(store_.Write(name).ok());
  const uint64_t generation = store_.tier->first_generation();
  for (const bool removed : {false, true}) {
    store_.Close();
    if (removed) {
      std::filesystem::remove_all(directory_ + "/manifest");
    } else {
      WriteFile(directory_ + "/manifest/CURRENT", "damage");
    }
    ASSERT_TRUE(store_.Open().ok());
    EXPECT_THAT(store_.Names(), ElementsAre(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11));
    EXPECT_GT(store_.tier->first_generation(), generation);
    for (uint32_t name = 1; name <= 11; ++name) EXPECT_TRUE(store_.Read(name).ok());
  }
}

TEST_F(DiskTierTest, SegmentsThatNobodyRecordsAreRemovedAndStrangeFilesAreNot) {
  ASSERT_TRUE(store_.Open().ok());
  EXPECT_TRUE(store_.Write(1).ok());
  const std::string own = Segments()[0];
  store_.Close();
  WriteFile(segments_ + "/00ffffffffffffff.segment", std::string(20000, 'x'));
  WriteFile(segments_ + "/README", "mine");
  ASSERT_TRUE(store_.Open().ok());
  EXPECT_THAT(Segments(), ElementsAre(own, segments_ + "/README"));
  EXPECT_TRUE(store_.Write(2).ok());
  EXPECT_THAT(Segments(), Contains(segments_ + "/0100000000000000.segment"));
}

}  // namespace
}  // namespace kvasir::kvstore
