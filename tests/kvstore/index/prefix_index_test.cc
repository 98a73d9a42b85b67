#include "kvstore/index/prefix_index.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/kvstore/index/letter_prefixes.h"
#include "tests/support/iterations.h"

namespace kvasir::kvstore {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class PrefixIndexTest : public ::testing::Test {
 protected:
  explicit PrefixIndexTest(int64_t capacity = 4) : index_(PrefixIndex::Create(capacity)) {}
  ~PrefixIndexTest() override { EXPECT_TRUE(index_->CheckIntegrity().ok()); }

  // Computes the blocks of `letters` that follow `blocks` and publishes them.
  std::vector<Block> Compute(const std::string& letters, std::vector<Block> blocks = {}) {
    while (blocks.size() < letters.size()) {
      Block block = index_->Allocate().value();
      last_published_ = Publish(block, blocks.empty() ? Block() : blocks.back(),
                                letters.substr(0, blocks.size() + 1));
      blocks.push_back(std::move(block));
    }
    return blocks;
  }
  bool Publish(const Block& block, const Block& before, const std::string& letters) {
    const std::string parent = letters.substr(0, letters.size() - 1);
    return index_->Publish({.block = block,
                            .before = before,
                            .parent = HashOf(Scope(), parent),
                            .hash = HashOf(Scope(), letters),
                            .tokens = Tokens(letters.substr(letters.size() - 1))});
  }
  // Returns the number of blocks found for a prompt of these blocks and one more token.
  size_t Hits(const std::string& letters, const PrefixHash& scope = Scope()) {
    std::vector<int32_t> tokens = Tokens(letters);
    tokens.push_back(0);
    return index_->Match(scope, tokens).blocks.size();
  }

  std::unique_ptr<PrefixIndex> index_;
  bool last_published_ = false;
};

TEST_F(PrefixIndexTest, FindsTheLongestCachedPrefixAndItsChainValue) {
  const std::vector<Block> blocks = Compute("abc");
  std::vector<int32_t> tokens = Tokens("abx");
  const PrefixMatch match = index_->Match(Scope(), tokens);
  ASSERT_EQ(match.blocks.size(), 2u);
  EXPECT_EQ(match.blocks[0].id(), blocks[0].id());
  EXPECT_EQ(match.blocks[1].id(), blocks[1].id());
  EXPECT_EQ(match.hashes, (std::vector<PrefixHash>{HashOf(Scope(), "a"), HashOf(Scope(), "ab")}));
}

TEST_F(PrefixIndexTest, WhatADecodePartHadAHandInIsFoundUnderItsKeyOnly) {
  const std::vector<Block> blocks = Compute("a");
  const std::vector<int32_t> tokens = Tokens("abx");
  const PrefixHash parent = HashOf(Scope(), "a");
  const DecodePart decode = {.begin = 100, .key = "quest@100"};
  EXPECT_EQ(decode.KeyOf(0), "");
  EXPECT_EQ(decode.KeyOf(1), "quest@100");
  const std::vector<int32_t> tokens_of_b = Tokens("b");
  const PrefixHash own = HashBlock(parent, tokens_of_b, decode.KeyOf(1));
  const Block block = index_->Allocate().value();
  const FullBlock full = {
      .block = block, .before = blocks[0], .parent = parent, .hash = own, .tokens = tokens_of_b};
  EXPECT_TRUE(index_->Publish(full));
  EXPECT_TRUE(index_->Publish(full));  // a repetition changes nothing
  EXPECT_EQ(index_->Match(Scope(), tokens, decode).hashes, (std::vector<PrefixHash>{parent, own}));
  EXPECT_EQ(index_->Match(Scope(), tokens).blocks.size(), 1u);
  EXPECT_EQ(index_->Match(Scope(), tokens, {.begin = 101, .key = "quest@101"}).blocks.size(), 1u);
  EXPECT_EQ(index_->CheckIntegrity(), absl::OkStatus());
}

TEST_F(PrefixIndexTest, LeavesOneTokenToCompute) {
  Compute("abc");
  const std::vector<int32_t> tokens = Tokens("abc");
  for (const auto& [length, hits] : std::vector<std::pair<size_t, size_t>>{
           {0, 0}, {1, 0}, {63, 0}, {64, 0}, {65, 1}, {128, 1}, {129, 2}, {191, 2}, {192, 2}}) {
    EXPECT_EQ(index_->Match(Scope(), absl::MakeConstSpan(tokens).first(length)).blocks.size(), hits)
        << length;
  }
  EXPECT_EQ(Hits("abc"), 3u);
}

TEST_F(PrefixIndexTest, ScopesDoNotMix) {
  Compute("a");
  EXPECT_EQ(Hits("a", Scope("another tenant")), 0u);
  EXPECT_EQ(Hits("a"), 1u);
}

TEST_F(PrefixIndexTest, IdleBlocksStayUntilRoomIsNeededThenLeavesGoFirst) {
  std::vector<Block> blocks = Compute("abc");
  const std::vector<BlockId> ids = {blocks[0].id(), blocks[1].id(), blocks[2].id()};
  std::swap(blocks[0], blocks[2]);  // the leaf's handle is destroyed last
  blocks.clear();
  EXPECT_EQ(index_->available_blocks(), 4);
  EXPECT_THAT(index_->TakeDropped(), IsEmpty());
  std::vector<Block> others;
  for (int i = 0; i < 3; ++i) others.push_back(index_->Allocate().value());
  EXPECT_THAT(index_->TakeDropped(), ElementsAre(ids[2], ids[1]));
  EXPECT_EQ(Hits("abc"), 1u);
  EXPECT_EQ(index_->stats().evictions, 2);
}

TEST_F(PrefixIndexTest, EvictsTheLeastRecentlyUsed) {
  Compute("a");
  Compute("b");
  Compute("c");
  EXPECT_EQ(Hits("a"), 1u);  // used again: now b is the oldest
  const Block one = index_->Allocate().value();
  const Block two = index_->Allocate().value();
  EXPECT_EQ(Hits("a"), 1u);
  EXPECT_EQ(Hits("b"), 0u);
  EXPECT_EQ(Hits("c"), 1u);
}

TEST_F(PrefixIndexTest, HeldBlocksAreNeverEvicted) {
  const std::vector<Block> blocks = Compute("abcd");
  EXPECT_EQ(index_->available_blocks(), 0);
  const absl::Status status = index_->Allocate().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("4 of 4 are held"));
}

TEST_F(PrefixIndexTest, AHeldBlockKeepsItsWholePrefix) {
  std::vector<Block> blocks = Compute("abc");
  blocks.erase(blocks.begin(), blocks.begin() + 2);
  EXPECT_EQ(index_->available_blocks(), 1);
  const Block one = index_->Allocate().value();
  EXPECT_FALSE(index_->Allocate().ok());
  EXPECT_EQ(Hits("abc"), 3u);
}

TEST_F(PrefixIndexTest, ASecondCopyOfAPrefixStaysPrivateAndIsDroppedWithItsHolder) {
  const std::vector<Block> first = Compute("a");
  std::vector<Block> second = Compute("a");
  EXPECT_FALSE(last_published_);
  const BlockId copy = second[0].id();
  second.clear();
  EXPECT_THAT(index_->TakeDropped(), ElementsAre(copy));
  EXPECT_EQ(Hits("a"), 1u);
}

TEST_F(PrefixIndexTest, WhatFollowsAPrivateCopyIsPublishedBehindTheCachedOne) {
  const std::vector<Block> first = Compute("a");
  const std::vector<Block> second = Compute("ab");
  EXPECT_TRUE(last_published_);
  EXPECT_EQ(Hits("ab"), 2u);
}

TEST_F(PrefixIndexTest, PublishingNeverTakesAwayAvailableBlocks) {
  std::vector<Block> first = Compute("a");
  std::vector<Block> second = Compute("a");
  first.clear();  // the cached copy is idle now; sequences may rely on it
  const Block next = index_->Allocate().value();
  const int64_t available = index_->available_blocks();
  EXPECT_FALSE(Publish(next, second[0], "ab"));
  EXPECT_EQ(index_->available_blocks(), available);
}

TEST_F(PrefixIndexTest, ALostBlockTakesWhatContinuesItAlong) {
  std::vector<Block> blocks = Compute("abc");
  const BlockId b = blocks[1].id();
  const BlockId c = blocks[2].id();
  blocks.pop_back();
  index_->Lost(b);
  EXPECT_EQ(Hits("abc"), 1u);
  EXPECT_THAT(index_->TakeDropped(), ElementsAre(c));
  blocks.pop_back();
  EXPECT_THAT(index_->TakeDropped(), ElementsAre(b));
  index_->Lost(b);
  index_->Lost(BlockId(12345));
  Compute("ab", std::move(blocks));
  EXPECT_TRUE(last_published_);
  EXPECT_EQ(Hits("abc"), 2u);
}

TEST_F(PrefixIndexTest, NothingIsPublishedBehindALostBlock) {
  std::vector<Block> blocks = Compute("a");
  index_->Lost(blocks[0].id());
  Compute("ab", std::move(blocks));
  EXPECT_FALSE(last_published_);
  EXPECT_EQ(Hits("ab"), 0u);
}

TEST(PrefixIndexCollisions, AWeakHashGivesNoWrongReuseIn1e6Lookups) {
  constexpr int64_t kCached = 20000;
  const BlockHasher weak = WeakHasher(16);
  const auto index = PrefixIndex::Create(kCached, weak);
  std::mt19937 rng(7);
  const auto prompt = [](uint32_t number) {
    std::vector<int32_t> tokens(kBlockTokens + 1, 1);
    tokens[0] = static_cast<int32_t>(number);
    return tokens;
  };
  std::vector<int64_t> number_of_id;
  for (uint32_t i = 0; i < kCached; ++i) {
    const std::vector<int32_t> tokens = prompt(i);
    const auto block_tokens = absl::MakeConstSpan(tokens).first(kBlockTokens);
    const Block block = index->Allocate().value();
    number_of_id.push_back(i);
    index->Publish({.block = block,
                    .before = Block(),
                    .parent = Scope(),
                    .hash = weak(Scope(), block_tokens, ""),
                    .tokens = block_tokens});
  }
  int64_t hits = 0;
  const int64_t lookups = testing::Iterations(1000000);
  for (int64_t i = 0; i < lookups; ++i) {
    const uint32_t number = static_cast<uint32_t>(rng() % (2 * kCached));
    const PrefixMatch match = index->Match(Scope(), prompt(number));
    if (match.blocks.empty()) continue;
    ++hits;
    ASSERT_EQ(number_of_id[static_cast<size_t>(match.blocks[0].id().value)], number);
  }
  EXPECT_GT(hits, lookups / 4);
  EXPECT_GT(index->stats().hash_collisions, lookups / 20);
}

}  // namespace
}  // namespace kvasir::kvstore
