#include "kvstore/heads/followed_store.h"

#include <filesystem>
#include <fstream>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <memory>
#include <string>
#include <utility>

#include "kvstore/heads/extent_finder.h"
#include "tests/kvstore/test_blocks.h"
#include "tests/kvstore/tiers/disk_tier_fixture.h"

namespace kvasir::kvstore {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::testing::UnorderedElementsAre;

// `store_` owns the store that a second one follows.
class FollowedStoreTest : public DiskTierTest {
 protected:
  absl::Status Follow(std::chrono::milliseconds patience = std::chrono::seconds(30)) {
    FollowedStoreOptions options = {
        .directory = directory_,
        .shard = SmallShard(),
        .capacity_bytes = 100 * store_.format.extent_bytes(),
        .look_every = std::chrono::milliseconds(1),
        .patience = patience,
        .io = std::make_unique<FaultyFileIo>(MakeFileIo(IoEngine::kThreads), follower_.control)};
    auto opened = FollowStore(std::move(options));
    if (!opened.ok()) return opened.status();
    follower_.tier = *std::move(opened);
    return absl::OkStatus();
  }
  // The plans of both ranks say that the block is to be written.
  absl::Status Expect(uint32_t name) { return follower_.Write(name, 1); }
  // Waits until the follower has found a block.
  StoredBlock AwaitFound() {
    for (;;) {
      follower_.tier->Wait();
      const bool expects = follower_.tier->ExpectsBlocks();
      const TierEvents events = follower_.tier->Poll();
      if (!events.found.empty()) return events.found[0];
      if (!expects) {
        ADD_FAILURE() << "it has given up";
        return {};
      }
    }
  }
  // Waits until the follower has found what it expects, or has given up.
  void AwaitExpected() {
    for (bool expects = true; expects;) {
      follower_.tier->Wait();
      expects = follower_.tier->ExpectsBlocks();
      const TierEvents events = follower_.tier->Poll();
      follower_.forgotten.insert(follower_.forgotten.end(), events.forgotten.begin(),
                                 events.forgotten.end());
    }
  }

  TestStore follower_{directory_};
};

TEST_F(FollowedStoreTest, HoldsWhatWasStoredBefore) {
  ASSERT_TRUE(store_.Open().ok());
  for (uint32_t name = 1; name <= 10; ++name) ASSERT_TRUE(store_.Write(name).ok());
  ASSERT_TRUE(Follow().ok());
  EXPECT_THAT(follower_.Names(), SizeIs(10));
  EXPECT_THAT(follower_.tier->Poll().found, IsEmpty()) << "the inventory says so";
  for (uint32_t name = 1; name <= 10; ++name) EXPECT_TRUE(follower_.Read(name).ok());
  EXPECT_EQ(follower_.Read(11).code(), absl::StatusCode::kNotFound);
  const TierStats stats = follower_.tier->stats();
  EXPECT_EQ(stats.read_blocks, 10);
  EXPECT_EQ(stats.blocks, 10);
  EXPECT_EQ(stats.capacity_blocks, 100);
  EXPECT_GT(follower_.tier->first_generation(), store_.tier->first_generation());
  EXPECT_FALSE(follower_.tier->ExpectsBlocks());
}

TEST_F(FollowedStoreTest, FindsWhatItExpectsWhenTheOwnerHasWrittenIt) {
  ASSERT_TRUE(Follow().ok()) << "before there is a folder";
  ASSERT_TRUE(store_.Open().ok());
  for (uint32_t name = 1; name <= 20; ++name) {
    EXPECT_EQ(Expect(name).code(), absl::StatusCode::kUnavailable);
    EXPECT_TRUE(follower_.tier->ExpectsBlocks());
    EXPECT_TRUE(store_.Write(name).ok());
    const StoredBlock found = AwaitFound();
    EXPECT_EQ(found.hash, HashOf(name));
    EXPECT_EQ(found.tokens, TokensOf(name));
    EXPECT_FALSE(follower_.tier->ExpectsBlocks());
    EXPECT_TRUE(follower_.Read(name).ok());
  }
  EXPECT_GT(Segments().size(), 3u);
  EXPECT_TRUE(Expect(1).ok()) << "it is there";
}

// The extents of a group are written in any order.
TEST_F(FollowedStoreTest, AnExtentWhoseHeaderComesLastIsFound) {
  ASSERT_TRUE(store_.Open().ok());
  for (uint32_t name = 1; name <= 2; ++name) ASSERT_TRUE(store_.Write(name).ok());
  store_.Close();
  const std::string whole = ReadFile(Segments()[0]);
  const auto write_first = [&](const std::string& extent) {
    std::fstream file(Segments()[0], std::ios::in | std::ios::out | std::ios::binary);
    file.write(extent.data(), static_cast<std::streamsize>(extent.size()));
  };
  const auto extent_bytes = static_cast<size_t>(store_.format.extent_bytes());
  write_first(std::string(extent_bytes, '\0'));
  ASSERT_TRUE(Follow().ok());
  EXPECT_THAT(follower_.Names(), ElementsAre(2));
  EXPECT_EQ(Expect(1).code(), absl::StatusCode::kUnavailable);
  write_first(whole.substr(0, extent_bytes));
  EXPECT_EQ(AwaitFound().hash, HashOf(1));
  EXPECT_TRUE(follower_.Read(1).ok());
}

// Bug: its segments had the numbers of the old ones, which the follower still had open.
TEST_F(FollowedStoreTest, AStoreThatWasEmptiedIsFollowedOn) {
  ASSERT_TRUE(store_.Open().ok());
  ASSERT_TRUE(store_.Write(1).ok());
  ASSERT_TRUE(Follow(std::chrono::seconds(5)).ok());
  store_.Close();
  std::filesystem::remove_all(directory_);
  ASSERT_TRUE(store_.Open().ok());
  ASSERT_TRUE(store_.Write(2).ok());
  EXPECT_EQ(Expect(2).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(AwaitFound().hash, HashOf(2));
  EXPECT_TRUE(follower_.Read(2).ok());
  EXPECT_EQ(follower_.Read(1).code(), absl::StatusCode::kNotFound);
}

// Bug: a follower read it again for as long as it expected blocks.
TEST_F(FollowedStoreTest, AHeaderThatCannotBeReadIsGivenUp) {
  ASSERT_TRUE(store_.Open().ok());
  for (uint32_t name = 1; name <= 16; ++name) ASSERT_TRUE(store_.Write(name).ok());
  ASSERT_GT(Segments().size(), 3u);
  FaultyFileIo io(MakeFileIo(IoEngine::kThreads), follower_.control);
  for (const int64_t spared : {1, 0}) {
    const auto finder = ExtentFinder::Create(io, segments_, store_.format);
    ASSERT_TRUE(finder.ok());
    follower_.control->Set({.read_error = 1});
    for (int64_t look = spared; look < ExtentFinder::kMostFailedLooks; ++look) {
      EXPECT_THAT((*finder)->Find().extents, IsEmpty());
    }
    follower_.control->Set({});
    EXPECT_THAT((*finder)->Find().extents, SizeIs(spared == 1 ? 16 : 0));
  }
}

TEST_F(FollowedStoreTest, GivesUpOnWhatTheOwnerNeverWrites) {
  ASSERT_TRUE(store_.Open().ok());
  ASSERT_TRUE(Follow(std::chrono::milliseconds(2)).ok());
  EXPECT_EQ(Expect(1).code(), absl::StatusCode::kUnavailable);
  follower_.tier->Wait();
  EXPECT_FALSE(follower_.tier->ExpectsBlocks());
  EXPECT_THAT(follower_.Names(), IsEmpty());
}

TEST_F(FollowedStoreTest, WhatTheOwnerEvictedIsAMissAndForgotten) {
  ASSERT_TRUE(store_.Open(/*capacity_blocks=*/6).ok());
  for (uint32_t name = 1; name <= 6; ++name) ASSERT_TRUE(store_.Write(name).ok());
  const std::string first = Segments()[0];
  ASSERT_TRUE(Follow().ok());
  ASSERT_TRUE(store_.Write(7).ok());  // 1 leaves: a hole
  ASSERT_THAT(store_.Names(), ElementsAre(2, 3, 4, 5, 6, 7));
  EXPECT_EQ(follower_.Read(1).code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(follower_.forgotten, ElementsAre(HashOf(1)));
  EXPECT_EQ(follower_.tier->stats().checksum_failures, 0);
  EXPECT_THAT(follower_.Names(), ElementsAre(2, 3, 4, 5, 6, 7)) << "and 7 was seen on the way";
  for (uint32_t name = 8; name <= 30; ++name) ASSERT_TRUE(store_.Write(name).ok());
  ASSERT_FALSE(std::filesystem::exists(first));
  EXPECT_EQ(follower_.Read(2).code(), absl::StatusCode::kNotFound) << "its file is gone";
}

TEST_F(FollowedStoreTest, BlocksLeaveWithTheirSegments) {
  ASSERT_TRUE(store_.Open(/*capacity_blocks=*/6).ok());
  for (uint32_t name = 1; name <= 6; ++name) ASSERT_TRUE(store_.Write(name).ok());
  ASSERT_TRUE(Follow().ok());
  for (uint32_t name = 7; name <= 30; ++name) ASSERT_TRUE(store_.Write(name).ok());
  ASSERT_TRUE(store_.Write(1).ok());
  ASSERT_THAT(Segments(), SizeIs(2)) << "none of those of the beginning";
  ASSERT_TRUE(store_.Write(31).ok());
  EXPECT_EQ(Expect(31).code(), absl::StatusCode::kUnavailable);
  AwaitExpected();
  EXPECT_THAT(follower_.Names(), ElementsAre(1, 27, 28, 29, 30, 31));
  EXPECT_THAT(follower_.forgotten, UnorderedElementsAre(HashOf(1), HashOf(2), HashOf(3), HashOf(4),
                                                        HashOf(5), HashOf(6)));
  EXPECT_TRUE(follower_.Read(1).ok()) << "it was found again";
}

// A segment with newer ones is looked at no more, but not before its headers were read.
TEST_F(FollowedStoreTest, WhatCouldNotBeReadIsFoundLater) {
  ASSERT_TRUE(store_.Open().ok());
  for (uint32_t name = 1; name <= 16; ++name) ASSERT_TRUE(store_.Write(name).ok());
  ASSERT_THAT(Segments(), SizeIs(4));
  uint32_t next = 17;
  for (const Faults& faults : {Faults{.read_error = 1}, Faults{.size_error = 1}}) {
    follower_.control->Set(faults);
    ASSERT_TRUE(Follow().ok());
    EXPECT_THAT(follower_.Names(), IsEmpty());
    follower_.control->Set({});
    EXPECT_EQ(Expect(next).code(), absl::StatusCode::kUnavailable);
    ASSERT_TRUE(store_.Write(next).ok());
    AwaitExpected();
    EXPECT_THAT(follower_.Names(), SizeIs(next));
    ++next;
  }
}

TEST_F(FollowedStoreTest, AnExtentOfAnotherVersionHidesNoOther) {
  ASSERT_TRUE(store_.Open().ok());
  ASSERT_TRUE(Follow().ok());
  for (uint32_t name = 1; name <= 8; ++name) ASSERT_TRUE(store_.Write(name).ok());
  std::string bytes = ReadFile(Segments()[1]);
  bytes[8] = 1;
  WriteFile(Segments()[1], bytes);
  EXPECT_EQ(Expect(8).code(), absl::StatusCode::kUnavailable);
  AwaitExpected();
  EXPECT_THAT(follower_.Names(), ElementsAre(1, 2, 3, 4, 6, 7, 8));
}

TEST_F(FollowedStoreTest, ABlockThatTheOwnerWroteAgainElsewhereIsFoundThere) {
  ASSERT_TRUE(store_.Open(6).ok());
  for (uint32_t name = 1; name <= 6; ++name) ASSERT_TRUE(store_.Write(name).ok());
  ASSERT_TRUE(Follow().ok());
  ASSERT_TRUE(store_.Write(7).ok());  // 1 leaves
  ASSERT_TRUE(store_.Write(1, store_.tier->first_generation() + 9).ok());
  EXPECT_TRUE(follower_.Read(1).ok());
  EXPECT_EQ(follower_.tier->stats().read_blocks, 1);
}

// The generation of a block that is written again may be that of its first writing, or a smaller
// one: another rank sealed it.
TEST_F(FollowedStoreTest, ABlockThatWasSeenAgainElsewhereIsReadThere) {
  ASSERT_TRUE(store_.Open(6).ok());
  const uint64_t generation = store_.tier->first_generation() + 9;
  for (uint32_t name = 1; name <= 6; ++name) ASSERT_TRUE(store_.Write(name, generation).ok());
  ASSERT_TRUE(Follow().ok());
  for (uint32_t name = 3; name <= 4; ++name) ASSERT_TRUE(store_.Write(name).ok());  // used last
  for (uint32_t name = 7; name <= 8; ++name) ASSERT_TRUE(store_.Write(name).ok());
  ASSERT_THAT(store_.Names(), ElementsAre(3, 4, 5, 6, 7, 8));
  ASSERT_TRUE(store_.Write(1, generation).ok());
  ASSERT_TRUE(store_.Write(2, generation - 1).ok());
  ASSERT_TRUE(store_.Write(9).ok());
  EXPECT_EQ(Expect(9).code(), absl::StatusCode::kUnavailable);
  ASSERT_THAT(store_.Names(), ElementsAre(1, 2, 4, 7, 8, 9)) << "the first segment has 4";
  AwaitExpected();
  EXPECT_THAT(follower_.Names(), Contains(9)) << "and all before it was seen";
  EXPECT_TRUE(follower_.Read(1).ok());
  EXPECT_TRUE(follower_.Read(2).ok());
  EXPECT_THAT(follower_.forgotten, IsEmpty());
}

TEST_F(FollowedStoreTest, DamageIsFoundAndForgotten) {
  ASSERT_TRUE(store_.Open().ok());
  for (uint32_t name = 1; name <= 2; ++name) ASSERT_TRUE(store_.Write(name).ok());
  ASSERT_TRUE(Follow().ok());
  std::string bytes = ReadFile(Segments()[0]);
  bytes[static_cast<size_t>(store_.format.page_offset(1))] ^= 1;
  WriteFile(Segments()[0], bytes);
  EXPECT_EQ(follower_.Read(1).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(follower_.tier->stats().checksum_failures, 1);
  EXPECT_THAT(follower_.Names(), ElementsAre(2));
  EXPECT_TRUE(follower_.Read(2).ok());
}

TEST_F(FollowedStoreTest, AReadErrorIsTriedOnceMore) {
  ASSERT_TRUE(store_.Open().ok());
  for (uint32_t name = 0; name <= 20; ++name) ASSERT_TRUE(store_.Write(name).ok());
  ASSERT_TRUE(Follow().ok());
  follower_.control->Set({.read_error = 1});
  EXPECT_EQ(follower_.Read(0).code(), absl::StatusCode::kDataLoss);
  follower_.control->Set({.read_error = 0.3});
  int64_t passed = 0;
  for (uint32_t name = 1; name <= 20; ++name) {
    const int64_t failed = follower_.tier->stats().failed_reads;
    const absl::Status read = follower_.Read(name);
    passed += read.ok() && follower_.tier->stats().failed_reads > failed ? 1 : 0;
  }
  EXPECT_GT(passed, 0) << "errors that passed";
}

TEST_F(FollowedStoreTest, AStoreOfAnotherModelOrVersionIsRefused) {
  ASSERT_TRUE(store_.Open().ok());
  ASSERT_TRUE(store_.Write(1).ok());
  store_.Close();
  FollowedStoreOptions options = {.directory = directory_, .shard = SmallShard()};
  options.shard.weights_hash[5] = 'x';
  const absl::Status status = FollowStore(std::move(options)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("choose another kv_disk_path"));
  std::string bytes = ReadFile(Segments()[0]);
  bytes[8] = 1;
  WriteFile(Segments()[0], bytes);
  EXPECT_THAT(std::string(Follow().message()), HasSubstr("version 1"));
}

}  // namespace
}  // namespace kvasir::kvstore
