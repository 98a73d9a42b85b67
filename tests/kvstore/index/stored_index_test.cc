#include "kvstore/index/stored_index.h"

#include <map>
#include <random>
#include <set>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/support/iterations.h"

namespace kvasir::kvstore {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

// Blocks are named by small numbers; block n holds the token n 64 times.
std::vector<int32_t> Tokens(const std::vector<int32_t>& names) {
  std::vector<int32_t> tokens;
  for (int32_t name : names) tokens.insert(tokens.end(), kBlockTokens, name);
  return tokens;
}

const PrefixHash kScope =
    HashScope({.tenant = "t", .weights_hash = {}, .kv_form = {}, .prefill_policy = {}});

PrefixHash HashOf(const std::vector<int32_t>& names) {
  PrefixHash hash = kScope;
  for (int32_t name : names) hash = HashBlock(hash, Tokens({name}), "");
  return hash;
}

class StoredIndexTest : public ::testing::Test {
 protected:
  void Store(int64_t rank, const std::vector<int32_t>& names) {
    index_.Stored(rank, HashOf(names), Tokens({names.back()}));
  }
  // Matches a prompt of these blocks and one more token. Returns whether each block is held.
  std::vector<bool> Held(const std::vector<int32_t>& names) {
    std::vector<int32_t> tokens = Tokens(names);
    tokens.push_back(0);
    std::vector<bool> held;
    std::vector<int32_t> chain;
    for (const StoredLink& link : index_.Match(kScope, tokens)) {
      chain.push_back(names[held.size()]);
      EXPECT_EQ(link.hash, HashOf(chain));
      held.push_back(link.held);
    }
    return held;
  }
  size_t Hits(const std::vector<int32_t>& names) { return Held(names).size(); }

  StoredIndex index_{2};
};

TEST_F(StoredIndexTest, ABlockCountsWhenEveryRankHoldsIt) {
  Store(0, {1});
  Store(0, {1});
  EXPECT_EQ(Hits({1}), 0u);
  Store(1, {1});
  EXPECT_EQ(Hits({1}), 1u);
  index_.Forgotten(0, HashOf({1}));
  index_.Forgotten(0, HashOf({1}));
  EXPECT_EQ(Hits({1}), 0u);
  EXPECT_EQ(index_.stats().partly_held, 1);
  index_.Forgotten(1, HashOf({1}));
  EXPECT_EQ(index_.stats().partly_held, 0);
  index_.Forgotten(1, HashOf({7}));  // unknown block
}

TEST_F(StoredIndexTest, TheChainEndsAtTheLastBlockThatIsStored) {
  for (int64_t rank : {0, 1}) {
    Store(rank, {1});
    Store(rank, {1, 2});
    Store(rank, {1, 2, 3, 4});
  }
  Store(0, {1, 2, 3, 4, 5});
  EXPECT_THAT(Held({1, 2, 3, 4, 5, 6}), ElementsAre(true, true, false, true));
  EXPECT_EQ(Hits({2}), 0u);
  // The chain continues after any parent.
  const std::vector<int32_t> rest = Tokens({2, 3});
  EXPECT_THAT(index_.Match(HashOf({1}), rest), SizeIs(1));
}

TEST_F(StoredIndexTest, TooManyMissingBlocksInARowEndTheChain) {
  std::vector<int32_t> names(StoredIndex::kMostMissing, 1);
  for (int64_t rank : {0, 1}) Store(rank, names);
  EXPECT_EQ(Hits(names), names.size());
  names.push_back(1);
  for (int64_t rank : {0, 1}) {
    index_.Forgotten(rank, HashOf({names.begin(), names.end() - 1}));
    Store(rank, names);
  }
  EXPECT_EQ(Hits(names), 0u);
}

// Bug: each of any number of gaps cost a start of the sequence.
TEST_F(StoredIndexTest, TooManyGapsEndTheChain) {
  std::vector<int32_t> names;
  const auto store_every_second = [&](int64_t gaps) {
    for (int64_t gap = 0; gap < gaps; ++gap) {
      names.insert(names.end(), {1, 1});
      for (int64_t rank : {0, 1}) Store(rank, names);
    }
  };
  store_every_second(StoredIndex::kMostGaps);
  EXPECT_EQ(Hits(names), names.size());
  const size_t most = names.size();
  store_every_second(1);
  EXPECT_EQ(Hits(names), most);
}

TEST_F(StoredIndexTest, WhatADecodePartHadAHandInIsFoundUnderItsKeyOnly) {
  const DecodePart decode = {.begin = 64, .key = "quest@64"};
  const PrefixHash own = HashBlock(HashOf({1}), Tokens({2}), decode.key);
  for (int64_t rank : {0, 1}) index_.Stored(rank, own, Tokens({2}));
  const std::vector<int32_t> rest = Tokens({2, 3});
  EXPECT_THAT(index_.Match(HashOf({1}), rest, 1, decode), SizeIs(1));
  EXPECT_THAT(index_.Match(HashOf({1}), rest, 0, decode), IsEmpty());  // another position
  EXPECT_THAT(index_.Match(HashOf({1}), rest), IsEmpty());
}

TEST_F(StoredIndexTest, LeavesOneTokenToCompute) {
  for (int64_t rank : {0, 1}) Store(rank, {1});
  const std::vector<int32_t> tokens = Tokens({1});
  EXPECT_THAT(index_.Match(kScope, tokens), IsEmpty());
}

TEST(StoredIndexCollisionTest, TokensAreCompared) {
  const auto weak = [](const PrefixHash& parent, absl::Span<const int32_t>, absl::string_view) {
    return parent;
  };
  StoredIndex index(1, weak);
  index.Stored(0, kScope, Tokens({1}));
  std::vector<int32_t> tokens = Tokens({2});
  tokens.push_back(0);
  EXPECT_THAT(index.Match(kScope, tokens), IsEmpty());
  EXPECT_EQ(index.stats().hash_collisions, 1);
}

TEST(StoredIndexCollisionTest, RanksThatNameOtherTokensDoNotHoldTheSameBlock) {
  StoredIndex index(2);
  index.Stored(0, HashOf({1}), Tokens({1}));
  index.Stored(1, HashOf({1}), Tokens({2}));
  EXPECT_FALSE(index.HeldByAll(HashOf({1})));
  EXPECT_EQ(index.stats().blocks, 0);
}

TEST(StoredIndexModelTest, AgreesWithSetsOfEachRank) {
  std::mt19937 random(1);
  StoredIndex index(3);
  std::map<int32_t, std::set<int64_t>> holders;
  for (int64_t i = testing::Iterations(5000); i > 0; --i) {
    const auto name = static_cast<int32_t>(random() % 20);
    const auto rank = static_cast<int64_t>(random() % 3);
    if (random() % 2 == 0) {
      index.Stored(rank, HashOf({name}), Tokens({name}));
      holders[name].insert(rank);
    } else {
      index.Forgotten(rank, HashOf({name}));
      holders[name].erase(rank);
    }
    int64_t all = 0, some = 0;
    for (const auto& [n, ranks] : holders) {
      EXPECT_EQ(index.HeldByAll(HashOf({n})), ranks.size() == 3);
      all += ranks.size() == 3 ? 1 : 0;
      some += !ranks.empty() && ranks.size() < 3 ? 1 : 0;
    }
    ASSERT_EQ(index.stats().blocks, all);
    ASSERT_EQ(index.stats().partly_held, some);
  }
}

}  // namespace
}  // namespace kvasir::kvstore
