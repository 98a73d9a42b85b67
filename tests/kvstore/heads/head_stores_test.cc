#include "kvstore/heads/head_stores.h"

#include <cstring>
#include <filesystem>
#include <fstream>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "kvstore/format/head_extent.h"
#include "kvstore/tiers/disk_tier.h"
#include "tests/kvstore/heads/head_blocks.h"
#include "tests/support/iterations.h"
#include "tests/support/memory_tier.h"
#include "tests/support/scratch_directory.h"

namespace kvasir::kvstore {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// --- over real stores, of which ranks of different degrees open those of their heads

class HeadStoresTest : public ::testing::Test {
 protected:
  void SetUp() override { spdlog::set_level(spdlog::level::off); }

  std::string Folder(int64_t head) const {
    return scratch_.path() + "/head" + std::to_string(head);
  }
  // A rank that holds `count` heads from `first` on.
  std::unique_ptr<Tier> Open(int64_t first, int64_t count, int64_t capacity_blocks = 100) const {
    const ExtentFormat rank = RankFormat(first, count);
    std::vector<std::unique_ptr<Tier>> heads;
    for (int64_t head = first; head < first + count; ++head) {
      DiskTierOptions options;
      options.directory = Folder(head);
      options.shard = ShardOfHeads(rank.shard(), {head, 1});
      if (count > 1) options.memory = rank;
      const int64_t extent = ExtentFormat::Create(options.shard).value().extent_bytes();
      options.capacity_bytes = capacity_blocks * extent;
      options.segment_bytes = 8 * extent;
      options.group_bytes = 3 * extent;
      heads.push_back(OpenDiskTier(std::move(options)).value());
    }
    return std::make_unique<HeadStores>(rank, std::move(heads));
  }
  static TierCompletion Await(Tier& tier, uint64_t ticket) {
    for (;;) {
      tier.Wait();
      for (TierCompletion& completion : tier.Poll().completions) {
        if (completion.ticket == ticket) return std::move(completion);
      }
    }
  }
  absl::Status Write(Tier& tier, uint32_t name) {
    const NamedBlock block(tier.format(), name, tier.first_generation() + name);
    tier.Write({{.ticket = ++ticket_, .block = block.identity, .extent = block.extent}});
    return Await(tier, ticket_).status;
  }
  // Returns OK only for an extent that is whole and whose bytes are those of the name.
  absl::Status Read(Tier& tier, uint32_t name) {
    const NamedBlock found(tier.format(), name + 1000, 1);
    tier.Read({{.ticket = ++ticket_, .hash = HashOf(name), .extent = found.extent}});
    const TierCompletion completion = Await(tier, ticket_);
    if (!completion.status.ok()) return completion.status;
    EXPECT_EQ(completion.block.tokens, TokensOf(name));
    const NamedBlock expected(tier.format(), name, completion.block.generation);
    EXPECT_TRUE(tier.format().Verify(completion.block, found.extent).ok());
    const size_t used = static_cast<size_t>(tier.format().pages_offset() +
                                            tier.format().shard().layout.block_bytes());
    for (size_t i = static_cast<size_t>(tier.format().pages_offset()); i < used; ++i) {
      if (found.extent[i] != expected.extent[i]) {
        ADD_FAILURE() << "block " << name << " came back with other pages";
        break;
      }
    }
    return absl::OkStatus();
  }
  static std::set<uint32_t> Names(const Tier& tier) {
    std::set<uint32_t> names;
    for (const StoredBlock& block : tier.Inventory()) {
      uint32_t name = 0;
      std::memcpy(&name, block.hash.data(), sizeof(name));
      EXPECT_EQ(block.tokens, TokensOf(name));
      EXPECT_TRUE(tier.Holds(block.hash));
      names.insert(name);
    }
    return names;
  }

  testing::ScratchDirectory scratch_;
  uint64_t ticket_ = 0;
};

TEST_F(HeadStoresTest, WhatOneDegreeWroteEveryDegreeReads) {
  for (int64_t first = 0; first < 4; first += 2) {  // two ranks
    const std::unique_ptr<Tier> rank = Open(first, 2);
    for (uint32_t name = 1; name <= 10; ++name) ASSERT_TRUE(Write(*rank, name).ok());
    EXPECT_EQ(rank->stats().written_blocks, 10);
  }
  for (const int64_t count : {4, 1, 2}) {
    for (int64_t first = 0; first < 4; first += count) {
      const std::unique_ptr<Tier> rank = Open(first, count);
      EXPECT_EQ(Names(*rank).size(), 10u);
      for (uint32_t name = 1; name <= 10; ++name) {
        EXPECT_TRUE(Read(*rank, name).ok()) << count << " heads from " << first;
      }
      EXPECT_EQ(rank->stats().read_blocks, 10);
      EXPECT_EQ(rank->stats().checksum_failures, 0);
    }
  }
}

TEST_F(HeadStoresTest, NewSealingsAreAboveThoseOfEveryHead) {
  uint64_t highest = 0;
  for (int i = 0; i < 3; ++i) {
    const std::unique_ptr<Tier> rank = Open(0, 1);
    ASSERT_TRUE(Write(*rank, 1 + static_cast<uint32_t>(i)).ok());
    highest = rank->first_generation();
  }
  EXPECT_GT(Open(0, 2)->first_generation(), highest);
}

TEST_F(HeadStoresTest, ABlockThatOneHeadLacksIsAMissUntilItIsWrittenAgain) {
  for (int64_t first = 0; first < 4; first += 2) {
    const std::unique_ptr<Tier> rank = Open(first, 2);
    for (uint32_t name = 1; name <= 3; ++name) ASSERT_TRUE(Write(*rank, name).ok());
  }
  std::filesystem::remove_all(Folder(3));
  const std::unique_ptr<Tier> rank = Open(0, 4);
  EXPECT_THAT(Names(*rank), IsEmpty());
  EXPECT_EQ(Read(*rank, 1).code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(Write(*rank, 2).ok());
  EXPECT_THAT(Names(*rank), ElementsAre(2u));
  EXPECT_TRUE(Read(*rank, 2).ok());
  EXPECT_EQ(rank->stats().written_bytes, RankFormat(3, 1).extent_bytes()) << "of one head alone";
}

TEST_F(HeadStoresTest, ADamagedHeadCostsItsBlockAndIsWrittenAgain) {
  {
    const std::unique_ptr<Tier> rank = Open(0, 4);
    for (uint32_t name = 1; name <= 2; ++name) ASSERT_TRUE(Write(*rank, name).ok());
  }
  const std::filesystem::directory_iterator segment(Folder(2) + "/segments");
  std::fstream file(segment->path(), std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(RankFormat(2, 1).page_offset(1));  // of the first block
  file.put('x');
  file.put('y');
  file.close();
  const std::unique_ptr<Tier> rank = Open(0, 4);
  EXPECT_EQ(Read(*rank, 1).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(rank->stats().checksum_failures, 1);
  EXPECT_THAT(Names(*rank), ElementsAre(2u));
  EXPECT_TRUE(Write(*rank, 1).ok());
  EXPECT_TRUE(Read(*rank, 1).ok());
}

TEST_F(HeadStoresTest, HeadsEvictTheSameBlocks) {
  const std::unique_ptr<Tier> rank = Open(0, 4, /*capacity_blocks=*/6);
  for (uint32_t name = 1; name <= 40; ++name) ASSERT_TRUE(Write(*rank, name).ok());
  EXPECT_THAT(Names(*rank), ElementsAre(35u, 36u, 37u, 38u, 39u, 40u));
  EXPECT_EQ(rank->stats().evictions, 34);
  EXPECT_EQ(rank->stats().blocks, 6);
  for (uint32_t name = 35; name <= 40; ++name) EXPECT_TRUE(Read(*rank, name).ok());
}

// --- over doubles that end late, fail and forget at random

TEST(HeadStoresRandomTest, RequestsEndOnceAndOnlyWholeBlocksAreServed) {
  const ExtentFormat format = RankFormat(0, 4);
  for (uint32_t seed = 1; seed <= static_cast<uint32_t>(testing::Iterations(50)); ++seed) {
    SCOPED_TRACE(seed);
    std::vector<std::unique_ptr<Tier>> heads;
    for (uint32_t head = 0; head < 3; ++head) {
      heads.push_back(std::make_unique<MemoryTier>(
          format, seed * 10 + head,
          MemoryTierFaults{.refuse_write = 0.1, .fail_read = 0.05, .forget = 0.02}));
    }
    HeadStores stores(format, std::move(heads));
    std::mt19937 rng(seed);
    std::map<uint64_t, std::pair<uint32_t, std::unique_ptr<NamedBlock>>> open;  // by ticket
    uint64_t ticket = 0;
    int64_t served = 0, failed = 0;
    const auto poll = [&] {
      for (const TierCompletion& completion : stores.Poll().completions) {
        const auto request = open.extract(completion.ticket);
        ASSERT_FALSE(request.empty()) << "ended twice";
        const auto& [name, memory] = request.mapped();
        failed += completion.status.ok() ? 0 : 1;
        if (!completion.status.ok() || name == 0) continue;
        ++served;
        EXPECT_TRUE(format.Verify(completion.block, memory->extent).ok());
        EXPECT_EQ(completion.block.hash, HashOf(name));
      }
    };
    for (int i = 0; i < 200; ++i) {
      const uint32_t name = 1 + static_cast<uint32_t>(rng() % 20);
      const bool is_read = rng() % 2 == 0;
      auto block = std::make_unique<NamedBlock>(format, name, ++ticket);
      const BlockIdentity identity = block->identity;
      const absl::Span<std::byte> extent = block->extent;
      open[ticket] = {is_read ? name : 0, std::move(block)};
      if (is_read) {
        stores.Read({{.ticket = ticket, .hash = HashOf(name), .extent = extent}});
      } else {
        stores.Write({{.ticket = ticket, .block = identity, .extent = extent}});
      }
      poll();
    }
    while (!open.empty()) {
      stores.Wait();
      poll();
    }
    EXPECT_GT(served, 10);
    EXPECT_GT(failed, 10);
  }
}

}  // namespace
}  // namespace kvasir::kvstore
