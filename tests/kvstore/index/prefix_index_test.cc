#include "kvstore/index/prefix_index.h"

#include <algorithm>
#include <cstdlib>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <utility>

#include "tests/support/iterations.h"

namespace kvasir::kvstore {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

// A prefix for tests: one letter per block; each block is 64 times the letter.
std::vector<int32_t> Tokens(const std::string& letters) {
  std::vector<int32_t> tokens;
  for (char letter : letters) tokens.insert(tokens.end(), kBlockTokens, letter);
  return tokens;
}

PrefixHash Scope(const std::string& tenant = "") {
  PrefixScope scope;
  scope.tenant = tenant;
  return HashScope(scope);
}

PrefixHash HashOf(const PrefixHash& scope, const std::string& letters,
                  const BlockHasher& hasher = HashBlock) {
  PrefixHash hash = scope;
  for (char letter : letters) hash = hasher(hash, Tokens({letter}), "");
  return hash;
}

// Keeps only `bits` bits of the hash, so that collisions are common.
BlockHasher WeakHasher(int bits) {
  return
      [bits](const PrefixHash& parent, absl::Span<const int32_t> tokens, absl::string_view policy) {
        const PrefixHash strong = HashBlock(parent, tokens, policy);
        const uint32_t kept =
            (uint32_t{strong[0]} | uint32_t{strong[1]} << 8) & ((uint32_t{1} << bits) - 1);
        PrefixHash weak{};
        weak[0] = static_cast<uint8_t>(kept);
        weak[1] = static_cast<uint8_t>(kept >> 8);
        return weak;
      };
}

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

// The index written again in the simplest way: prefixes are strings of letters, and the held blocks
// are computed again after each operation.
class NaiveIndex {
 public:
  NaiveIndex(int64_t capacity, BlockHasher hasher) : capacity_(capacity), hasher_(hasher) {}

  struct Entry {
    std::string prefix;  // empty while not full
    bool cached = false;
    int64_t handles = 0;
    int64_t idle_since = -1;
    int64_t twin = -1;  // the cached block it equalled when it was full
  };

  std::vector<int64_t> Match(const std::string& letters, size_t limit) {
    std::vector<int64_t> ids;
    for (size_t n = 1; n <= limit; ++n) {
      const auto id = FindCached(letters.substr(0, n));
      if (!id.has_value()) break;
      ids.push_back(*id);
    }
    for (int64_t id : ids) ++entries_[id].handles;
    Settle();
    return ids;
  }
  bool CanAllocate() const { return Available() > 0; }
  void Allocate(int64_t id) {
    if (static_cast<int64_t>(entries_.size()) == capacity_) {
      auto victim = entries_.end();
      for (auto it = entries_.begin(); it != entries_.end(); ++it) {
        if (it->second.idle_since < 0) continue;
        if (victim == entries_.end() || it->second.idle_since < victim->second.idle_since) {
          victim = it;
        }
      }
      dropped_.insert(victim->first);
      entries_.erase(victim);
    }
    entries_[id].handles = 1;
  }
  bool Publish(int64_t id, std::optional<int64_t> before, const std::string& prefix) {
    const Entry* parent = nullptr;
    if (before.has_value()) {
      parent = &entries_.at(*before);
      if (!parent->cached) {
        if (!entries_.contains(parent->twin)) return false;
        parent = &entries_.at(parent->twin);
      }
      if (!parent->cached) return false;
    }
    entries_[id].prefix = prefix;
    const PrefixHash hash = HashOf(Scope(), prefix, hasher_);
    for (const auto& [other, entry] : entries_) {
      if (!entry.cached || HashOf(Scope(), entry.prefix, hasher_) != hash) continue;
      if (entry.prefix == prefix) entries_[id].twin = other;
      return false;
    }
    if (parent != nullptr && !IsHeld(*parent)) return false;
    entries_[id].cached = true;
    return true;
  }
  void Release(int64_t id) {
    --entries_[id].handles;
    Settle();
  }
  void Lost(int64_t id) {
    const auto it = entries_.find(id);
    if (it == entries_.end() || !it->second.cached) return;
    const std::string top = it->second.prefix;
    for (auto& [other, entry] : entries_) {
      if (entry.cached && entry.prefix.substr(0, top.size()) == top) entry.cached = false;
    }
    Settle();
  }
  int64_t Available() const {
    int64_t held = 0;
    for (const auto& [id, entry] : entries_) held += IsHeld(entry) ? 1 : 0;
    return capacity_ - held;
  }
  std::set<int64_t> TakeDropped() { return std::exchange(dropped_, {}); }
  std::vector<int64_t> Ids() const {
    std::vector<int64_t> ids;
    for (const auto& [id, entry] : entries_) ids.push_back(id);
    return ids;
  }

 private:
  std::optional<int64_t> FindCached(const std::string& prefix) const {
    for (const auto& [id, entry] : entries_) {
      if (entry.cached && entry.prefix == prefix) return id;
    }
    return std::nullopt;
  }
  bool IsHeld(const Entry& entry) const {
    if (entry.handles > 0) return true;
    if (!entry.cached) return false;
    for (const auto& [id, other] : entries_) {
      if (other.cached && other.handles > 0 && other.prefix.size() > entry.prefix.size() &&
          other.prefix.substr(0, entry.prefix.size()) == entry.prefix) {
        return true;
      }
    }
    return false;
  }
  // Drops private blocks without holders, and gives ages to newly idle blocks, the longest prefix
  // first.
  void Settle() {
    std::vector<std::pair<size_t, int64_t>> newly_idle;
    for (auto it = entries_.begin(); it != entries_.end();) {
      Entry& entry = it->second;
      if (entry.handles == 0 && !entry.cached) {
        dropped_.insert(it->first);
        it = entries_.erase(it);
        continue;
      }
      if (IsHeld(entry)) {
        entry.idle_since = -1;
      } else if (entry.idle_since < 0) {
        newly_idle.emplace_back(entry.prefix.size(), it->first);
      }
      ++it;
    }
    std::sort(newly_idle.rbegin(), newly_idle.rend());
    for (const auto& [length, id] : newly_idle) entries_[id].idle_since = clock_++;
  }

  const int64_t capacity_;
  const BlockHasher hasher_;
  std::map<int64_t, Entry> entries_;
  std::set<int64_t> dropped_;
  int64_t clock_ = 0;
};

// A sequence that runs: its prefix so far and its blocks.
struct Running {
  std::string letters;
  std::vector<Block> blocks;
};

class RandomOperations {
 public:
  RandomOperations(uint32_t seed, int64_t capacity, BlockHasher hasher)
      : rng_(seed),
        hasher_(hasher),
        index_(PrefixIndex::Create(capacity, hasher)),
        model_(capacity, hasher) {}

  void Step() {
    switch (rng_() % 8) {
      case 0:
        Start();
        break;
      case 1:
        Finish();
        break;
      case 2:
        if (rng_() % 8 == 0) Lose();
        break;
      case 3:
        Truncate();
        break;
      default:
        Grow();
    }
    Compare();
  }
  void FinishAll() {
    while (!running_.empty()) Finish();
    Compare();
  }
  int64_t hits() const { return hits_; }
  const PrefixIndex& index() const { return *index_; }

 private:
  void Start() {
    if (running_.size() >= 4) return;
    std::string prompt;
    for (uint64_t n = 1 + rng_() % 6; n > 0; --n) prompt += "ab"[rng_() % 2];
    std::vector<int32_t> tokens = Tokens(prompt);
    const bool one_more = rng_() % 2 == 0;
    if (one_more) tokens.push_back(1);
    PrefixMatch match = index_->Match(Scope(), tokens);
    std::vector<int64_t> ids;
    for (const Block& block : match.blocks) ids.push_back(block.id().value);
    ASSERT_EQ(ids, model_.Match(prompt, prompt.size() - (one_more ? 0 : 1))) << prompt;
    hits_ += static_cast<int64_t>(ids.size());
    prompt.resize(ids.size());
    ASSERT_EQ(match.hashes.size(), ids.size());
    ASSERT_EQ(ids.empty() ? Scope() : match.hashes.back(), HashOf(Scope(), prompt, hasher_));
    running_.push_back({.letters = prompt, .blocks = std::move(match.blocks)});
  }
  void Grow() {
    if (running_.empty()) return;
    Running& sequence = Pick();
    if (sequence.letters.size() >= 8) return;
    absl::StatusOr<Block> block = index_->Allocate();
    ASSERT_EQ(block.ok(), model_.CanAllocate());
    if (!block.ok()) return;
    model_.Allocate(block->id().value);
    const PrefixHash parent = HashOf(Scope(), sequence.letters, hasher_);
    const std::string letter(1, "ab"[rng_() % 2]);
    sequence.letters += letter;
    const Block before = sequence.blocks.empty() ? Block() : sequence.blocks.back();
    sequence.blocks.push_back(*block);
    if (rng_() % 16 == 0) return;  // never published
    const int64_t available = index_->available_blocks();
    const bool published = index_->Publish({.block = *block,
                                            .before = before,
                                            .parent = parent,
                                            .hash = hasher_(parent, Tokens(letter), ""),
                                            .tokens = Tokens(letter)});
    ASSERT_EQ(index_->available_blocks(), available);
    const auto before_id = before ? std::optional(before.id().value) : std::nullopt;
    ASSERT_EQ(published, model_.Publish(block->id().value, before_id, sequence.letters));
  }
  void Finish() {
    if (running_.empty()) return;
    const size_t i = rng_() % running_.size();
    Running sequence = std::move(running_[i]);
    running_.erase(running_.begin() + static_cast<int64_t>(i));
    std::shuffle(sequence.blocks.begin(), sequence.blocks.end(), rng_);
    while (!sequence.blocks.empty()) ReleaseLast(sequence);
  }
  void Truncate() {
    if (running_.empty()) return;
    Running& sequence = Pick();
    if (sequence.blocks.empty()) return;
    sequence.letters.pop_back();
    ReleaseLast(sequence);
  }
  void ReleaseLast(Running& sequence) {
    const int64_t id = sequence.blocks.back().id().value;
    sequence.blocks.pop_back();
    model_.Release(id);
  }
  void Lose() {
    const std::vector<int64_t> ids = model_.Ids();
    if (ids.empty()) return;
    const int64_t id = ids[rng_() % ids.size()];
    index_->Lost(BlockId(id));
    model_.Lost(id);
  }
  void Compare() {
    ASSERT_TRUE(index_->CheckIntegrity().ok()) << index_->CheckIntegrity();
    ASSERT_EQ(index_->available_blocks(), model_.Available());
    std::set<int64_t> dropped;
    for (BlockId id : index_->TakeDropped()) dropped.insert(id.value);
    ASSERT_EQ(dropped, model_.TakeDropped());
  }
  Running& Pick() { return running_[rng_() % running_.size()]; }

  std::mt19937 rng_;
  const BlockHasher hasher_;
  std::unique_ptr<PrefixIndex> index_;
  NaiveIndex model_;
  std::vector<Running> running_;
  int64_t hits_ = 0;
};

struct RandomCase {
  uint32_t seed;
  int64_t capacity;
  int hash_bits;  // 0: the real hash
};

class PrefixIndexRandomTest : public ::testing::TestWithParam<RandomCase> {};

TEST_P(PrefixIndexRandomTest, AgreesWithTheNaiveModel) {
  const auto [seed, capacity, bits] = GetParam();
  RandomOperations operations(seed, capacity,
                              bits == 0 ? BlockHasher(HashBlock) : WeakHasher(bits));
  const int64_t count = testing::Iterations(30000);
  for (int64_t i = 0; i < count; ++i) {
    operations.Step();
    if (HasFatalFailure()) FAIL() << "operation " << i << ", seed " << seed;
  }
  EXPECT_GT(operations.hits(), count / 20);
  EXPECT_GT(operations.index().stats().evictions, count / 100);
  EXPECT_EQ(operations.index().stats().hash_collisions > 0, bits != 0);
  operations.FinishAll();
}

INSTANTIATE_TEST_SUITE_P(Seeds, PrefixIndexRandomTest,
                         ::testing::Values(RandomCase{1, 6, 0}, RandomCase{2, 12, 0},
                                           RandomCase{3, 20, 0}, RandomCase{4, 12, 3},
                                           RandomCase{5, 20, 6}));

}  // namespace
}  // namespace kvasir::kvstore
