// What the disk tier erases is in none of its files, and what is pinned stays when others give way.
#include <algorithm>
#include <filesystem>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <string>
#include <vector>

#include "tests/kvstore/test_blocks.h"
#include "tests/kvstore/tiers/disk_tier_fixture.h"

namespace kvasir::kvstore {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Not;

class DiskTierEraseTest : public DiskTierTest {
 protected:
  static constexpr uint32_t kMine = 901;
  static constexpr uint32_t kTheirs = 902;

  // Names of the files that have bytes of the block: of its tokens, or of its last page.
  std::vector<std::string> FilesWith(uint32_t name, uint64_t generation) const {
    const TestBlock block(store_.format, name, generation);
    const auto bytes = [](const void* data, size_t size) {
      return std::string(static_cast<const char*>(data), size);
    };
    const std::string tokens = bytes(block.identity.tokens.data(), 64);
    const std::string page = bytes(block.extent.data() + store_.format.page_offset(3), 64);
    std::vector<std::string> files;
    for (const auto& file : std::filesystem::recursive_directory_iterator(directory_)) {
      if (!file.is_regular_file()) continue;
      const std::string data = ReadFile(file.path());
      const bool has_it =
          data.find(tokens) != std::string::npos || data.find(page) != std::string::npos;
      if (has_it) files.push_back(file.path().filename());
    }
    return files;
  }
  void WriteBoth() {
    ASSERT_TRUE(store_.Open().ok());
    generation_ = store_.tier->first_generation();
    for (uint32_t name = 1; name <= 10; ++name) {
      ASSERT_TRUE(store_.Write(name, 0, HashOf(name % 2 == 0 ? kMine : kTheirs)).ok());
    }
    for (uint32_t name = 1; name <= 10; ++name) {
      ASSERT_THAT(FilesWith(name, generation_), Not(IsEmpty()));
    }
  }

  uint64_t generation_ = 0;
};

TEST_F(DiskTierEraseTest, BlocksOfAnOwnerAreInNoFile) {
  WriteBoth();
  const TierErased erased = store_.Erase({.ticket = 5, .owner = HashOf(kMine)});
  EXPECT_TRUE(erased.status.ok()) << erased.status;
  EXPECT_EQ(erased.ticket, 5u);
  EXPECT_EQ(erased.blocks, 5);
  EXPECT_EQ(erased.bytes, 5 * store_.format.extent_bytes());
  EXPECT_EQ(store_.forgotten.size(), 5u);
  EXPECT_THAT(store_.Names(), ElementsAre(1u, 3u, 5u, 7u, 9u));
  for (uint32_t name = 2; name <= 10; name += 2) {
    EXPECT_THAT(FilesWith(name, generation_), IsEmpty()) << name;
  }
  for (uint32_t name = 1; name <= 10; name += 2) EXPECT_TRUE(store_.Read(name).ok()) << name;
  ASSERT_TRUE(store_.Open().ok());  // the manifest is whole
  EXPECT_THAT(store_.Names(), ElementsAre(1u, 3u, 5u, 7u, 9u));
}

TEST_F(DiskTierEraseTest, BlocksWithoutAnOwnerMayBeAnybodys) {
  WriteBoth();
  ASSERT_TRUE(store_.Write(11).ok());
  EXPECT_EQ(store_.Erase({.ticket = 1, .owner = HashOf(kMine)}).blocks, 6);
  EXPECT_THAT(store_.Names(), Not(Contains(11u)));
}

TEST_F(DiskTierEraseTest, NamedBlocksAndAllBlocksAreErased) {
  WriteBoth();
  const absl::flat_hash_set<PrefixHash> named = {HashOf(3), HashOf(4), HashOf(99)};
  EXPECT_EQ(store_.Erase({.ticket = 1, .blocks = named}).blocks, 2);
  EXPECT_THAT(FilesWith(3, generation_), IsEmpty());
  EXPECT_EQ(store_.Erase({.ticket = 2}).blocks, 8);
  EXPECT_THAT(store_.Names(), IsEmpty());
  for (uint32_t name = 1; name <= 10; ++name) EXPECT_THAT(FilesWith(name, generation_), IsEmpty());
}

// Blocks that were evicted before, where the file system keeps their bytes.
TEST_F(DiskTierEraseTest, WhatEvictionLeftBehindIsErased) {
  store_.control->Set({.no_holes = true});
  ASSERT_TRUE(store_.Open(6).ok());
  generation_ = store_.tier->first_generation();
  const std::vector<PrefixHash> first = {HashOf(1)};
  store_.tier->Pin(first);  // so that its segment stays
  for (uint32_t name = 1; name <= 7; ++name) {
    ASSERT_TRUE(store_.Write(name, 0, HashOf(kMine)).ok());
  }
  std::vector<uint32_t> left;
  const std::vector<uint32_t> names = store_.Names();
  for (uint32_t name = 1; name <= 7; ++name) {
    const bool is_there = std::find(names.begin(), names.end(), name) != names.end();
    if (!is_there && !FilesWith(name, generation_).empty()) left.push_back(name);
  }
  ASSERT_THAT(left, Not(IsEmpty()));
  ASSERT_TRUE(store_.Erase({.ticket = 1, .owner = HashOf(kTheirs)}).status.ok());
  for (const uint32_t name : left) EXPECT_THAT(FilesWith(name, generation_), IsEmpty()) << name;
  EXPECT_EQ(store_.Names(), names);
}

TEST_F(DiskTierEraseTest, AnErrorOfTheDiskIsTold) {
  WriteBoth();
  store_.control->Set({.write_error = 1});
  EXPECT_FALSE(store_.Erase({.ticket = 1, .owner = HashOf(kMine)}).status.ok());
  store_.control->Set({});
  EXPECT_TRUE(store_.Erase({.ticket = 2}).status.ok());
  for (uint32_t name = 1; name <= 10; ++name) EXPECT_THAT(FilesWith(name, generation_), IsEmpty());
}

TEST_F(DiskTierEraseTest, PinnedBlocksStayWhenOthersGiveWay) {
  ASSERT_TRUE(store_.Open(6).ok());
  const std::vector<PrefixHash> pins = {HashOf(1), HashOf(2), HashOf(9)};
  ASSERT_TRUE(store_.Write(1).ok());
  store_.tier->Pin(pins);  // the others are stored later
  for (uint32_t name = 2; name <= 20; ++name) ASSERT_TRUE(store_.Write(name).ok());
  EXPECT_GT(store_.tier->stats().evictions, 10);
  EXPECT_THAT(store_.Names(), Contains(1u));
  EXPECT_THAT(store_.Names(), Contains(2u));
  EXPECT_THAT(store_.Names(), Contains(9u));
  store_.tier->Unpin(pins);
  for (uint32_t name = 21; name <= 40; ++name) ASSERT_TRUE(store_.Write(name).ok());
  EXPECT_THAT(store_.Names(), Not(Contains(1u)));
}

}  // namespace
}  // namespace kvasir::kvstore
