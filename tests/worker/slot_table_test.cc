// Wrong plans are tested through the engine (engine_failure_test.cc).
#include "worker/engine/slot_table.h"

#include <memory>
#include <vector>

#include "gtest/gtest.h"

#include "kvstore/tiers/arena_residency.h"
#include "tests/kvstore/forwarding_residency.h"
#include "tests/worker/test_worker.h"

namespace kvasir::worker {
namespace {

class CountedPromotions final : public kvstore::ForwardingResidency {
 public:
  using kvstore::ForwardingResidency::ForwardingResidency;
  void Promote(int64_t /*extent*/) override { ++count; }

  int64_t count = 0;
};

v1::AttentionPolicy Dense() {
  v1::AttentionPolicy policy;
  policy.mutable_all();
  return policy;
}

class SlotTableTest : public testing::Test {
 protected:
  enum : uint32_t { kSparse = 1, kDensePrompt };  // policies
  static constexpr kernels::KvLayout kLayout = {
      .num_layers = 1, .num_kv_heads = 1, .head_dim = 4, .dtype = kernels::DType::kFloat32};

  SlotTableTest()
      : store_(kvstore::KvStore::Create(
                   {.shard = {.layout = kLayout},
                    .device_bytes = 8 * kLayout.block_bytes(),
                    .host_bytes = 128 * kLayout.block_bytes(),
                    .num_slots = 2,
                    .max_blocks_per_slot = 16},
                   nullptr,
                   [this](const kvstore::ResidencyOptions& options) {
                     auto counted = std::make_unique<CountedPromotions>(
                         kvstore::ArenaResidency::Make(options).value());
                     promotions_ = counted.get();
                     return absl::StatusOr<std::unique_ptr<kvstore::PageResidency>>(
                         std::move(counted));
                   })
                   .value()),
        table_({.num_slots = 2,
                .max_model_len = 1000,
                .vocab_size = 10,
                .pages_per_block = 1,
                .num_layers = kLayout.num_layers,
                .policies =
                    {{},
                     {.prefill = {}, .decode = {}, .decode_selector = 1, .decode_is_dense = false},
                     {.prefill = Dense(), .decode = {}}}},
               *store_) {}

  v1::SequenceStart MakeStart(int prompt_size, uint32_t policy) const {
    v1::SequenceStart start;
    for (int i = 0; i < prompt_size; ++i) start.add_tokens(3);
    start.set_num_prompt_tokens(static_cast<uint32_t>(prompt_size));
    start.set_policy_index(policy);
    start.set_tail_tokens(30);
    return start;
  }
  // Returns a row of slot 0 with as many new blocks as it needs, counted up from `first_block`.
  absl::StatusOr<RowWork> Prepare(uint32_t begin, uint32_t num_tokens, uint64_t first_block,
                                  int num_blocks) {
    v1::StepRow row;
    row.set_begin(begin);
    row.set_num_tokens(num_tokens);
    for (int i = 0; i < num_blocks; ++i) row.add_new_blocks(first_block++);
    absl::StatusOr<RowWork> work = table_.Prepare(row, truncations_);
    if (work.ok()) {  // as if it had been computed
      table_.at(0).kv_length = begin + num_tokens;
      table_.at(0).sound_length = begin + num_tokens;
    }
    return work;
  }
  // Seals blocks 1 to `count`, of which the last eight are in the device tier.
  void SealBlocks(int64_t count) {
    for (int64_t i = 1; i <= count; ++i) {
      const auto block = store_->Open(kernels::BlockId(i));
      ASSERT_TRUE(block.ok()) << block.status();
      const std::vector<int32_t> tokens(static_cast<size_t>(kernels::kPageTokens), 3);
      const kvstore::PrefixHash hash = {static_cast<uint8_t>(i)};
      ASSERT_TRUE(store_->Seal(kernels::BlockId(i), hash, tokens).ok());
    }
  }
  // Of the sequence `prefix` blocks are reused, from block `first` on, and `rest` tokens are not.
  v1::SequenceStart MakePrefixedStart(uint32_t policy, int64_t first, int64_t prefix,
                                      int rest) const {
    v1::SequenceStart start =
        MakeStart(static_cast<int>(prefix * kernels::kPageTokens) + rest, policy);
    for (int64_t i = 0; i < prefix; ++i) start.add_cached_blocks(static_cast<uint64_t>(first + i));
    return start;
  }
  // Starts it, and returns the number of blocks that are promoted.
  int64_t CountPromotions(uint32_t policy, int64_t first, int64_t prefix, int rest,
                          uint32_t decode_budget = 0) {
    v1::SequenceStart start = MakePrefixedStart(policy, first, prefix, rest);
    start.mutable_decode()->set_token_budget(decode_budget);
    const int64_t before = promotions_->count;
    EXPECT_EQ(table_.Start(start).status(), absl::OkStatus());
    EXPECT_EQ(table_.Free(0), absl::OkStatus());
    return promotions_->count - before;
  }
  void Generate(int32_t token) { table_.at(0).tokens.push_back(token); }

  CountedPromotions* promotions_ = nullptr;
  std::unique_ptr<kvstore::KvStore> store_;
  SlotTable table_;
  std::vector<Truncation> truncations_;
};

TEST_F(SlotTableTest, TailIsReadOneByOneUnlessDecodeIsDense) {
  ASSERT_TRUE(table_.Start(MakeStart(100, 0)).ok());
  EXPECT_EQ(table_.at(0).decode_begin, 100);
  ASSERT_TRUE(table_.Free(0).ok());
  ASSERT_TRUE(table_.Start(MakeStart(100, 1)).ok());
  EXPECT_EQ(table_.at(0).decode_begin, 70);
  ASSERT_TRUE(table_.Free(0).ok());
  ASSERT_TRUE(table_.Start(MakeStart(10, 1)).ok());
  EXPECT_EQ(table_.at(0).decode_begin, 0);
}

TEST_F(SlotTableTest, TruncationInsideAnOpenBlockAsksForItsBounds) {
  ASSERT_TRUE(table_.Start(MakeStart(100, 0)).ok());
  ASSERT_TRUE(Prepare(0, 100, 1, 2).ok());
  for (uint32_t position = 100; position < 130; ++position) {
    Generate(4);
    ASSERT_TRUE(Prepare(position, 1, 3, position == 128 ? 1 : 0).ok());
  }
  EXPECT_TRUE(truncations_.empty());
  ASSERT_TRUE(store_->Holds(kernels::BlockId(3)));
  // Back to 110 tokens: block 3 is dropped, block 2 keeps 46 tokens.
  ASSERT_TRUE(Prepare(110, 1, 0, 0).ok());
  ASSERT_EQ(truncations_.size(), 1u);
  EXPECT_EQ(truncations_[0].block, 1);
  EXPECT_EQ(truncations_[0].num_tokens, 46);
  EXPECT_FALSE(store_->Holds(kernels::BlockId(3)));
  EXPECT_EQ(table_.at(0).tokens.size(), 111u);
}

TEST_F(SlotTableTest, APrefixInHostMemoryIsPromotedIfTheRestReadsItAll) {
  SealBlocks(16);
  EXPECT_EQ(CountPromotions(kDensePrompt, 1, 12, 1), 12);
  EXPECT_EQ(CountPromotions(kDensePrompt, 9, 8, 100), 0) << "it is in the device tier";
  // Each of the tail's 30 tokens chooses 22 of 640, in all 660; or 21, in all 630.
  EXPECT_EQ(CountPromotions(kSparse, 1, 10, 30, 21), 10);
  EXPECT_EQ(CountPromotions(kSparse, 1, 10, 30, 20), 0);
  v1::SequenceStart wrong = MakePrefixedStart(kDensePrompt, 1, 12, 1);
  wrong.mutable_decode()->mutable_quality()->set_min_mass(0.5f);  // not declared
  const int64_t before = promotions_->count;
  EXPECT_EQ(table_.Start(wrong).status(), absl::OkStatus());
  EXPECT_TRUE(table_.IsLeftOut(0));
  EXPECT_EQ(promotions_->count, before);
}

TEST_F(SlotTableTest, TruncationBetweenBlocksNeedsNoBounds) {
  ASSERT_TRUE(table_.Start(MakeStart(128, 0)).ok());
  ASSERT_TRUE(Prepare(0, 128, 1, 2).ok());
  ASSERT_TRUE(Prepare(64, 64, 7, 1).ok());
  EXPECT_TRUE(truncations_.empty());
  EXPECT_FALSE(store_->Holds(kernels::BlockId(2)));
  EXPECT_TRUE(store_->Holds(kernels::BlockId(7)));
}

TEST_F(SlotTableTest, RowWithoutRoomLeavesNoBlockBehind) {
  ASSERT_TRUE(table_.Start(MakeStart(640, 0)).ok());
  EXPECT_EQ(Prepare(0, 640, 1, 10).status().code(), absl::StatusCode::kResourceExhausted);
  for (int64_t block = 1; block <= 10; ++block) {
    EXPECT_FALSE(store_->Holds(kernels::BlockId(block)));
  }
  EXPECT_TRUE(store_->CheckIntegrity().ok());
}

TEST_F(SlotTableTest, SealedBlocksOutliveTheSlotUntilTheyAreDropped) {
  ASSERT_TRUE(table_.Start(MakeStart(100, 0)).ok());
  ASSERT_TRUE(Prepare(0, 100, 1, 2).ok());
  v1::BlockSeal seal;
  seal.set_block_id(1);
  seal.set_prefix_hash(std::string(32, 'h'));
  ASSERT_TRUE(table_.Seal(seal).ok());
  ASSERT_TRUE(table_.Free(0).ok());
  EXPECT_TRUE(store_->Holds(kernels::BlockId(1)));
  EXPECT_FALSE(store_->Holds(kernels::BlockId(2)));
  table_.Drop(kernels::BlockId(1));
  EXPECT_FALSE(store_->Holds(kernels::BlockId(1)));
}

}  // namespace
}  // namespace kvasir::worker
