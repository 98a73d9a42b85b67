#include <algorithm>
#include <gtest/gtest.h>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "kvstore/index/prefix_index.h"
#include "tests/kvstore/index/letter_prefixes.h"
#include "tests/kvstore/index/naive_index.h"
#include "tests/support/iterations.h"

namespace kvasir::kvstore {
namespace {

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
