// A rank that holds some of a layer's KV heads: its keys, and queries of a tile of a prompt and of
// decode steps. The numbers do not depend on who holds the heads, so selections of layer scope can
// be compared over numbers of ranks.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <gtest/gtest.h>
#include <memory>
#include <random>
#include <vector>

#include "kernels/append/digests.h"
#include "kernels/append/key_codes.h"
#include "kernels/sparse/reuse/reusing_select.h"
#include "tests/support/attention_batch.h"

namespace kvasir::kernels {

struct LayerRankShape {
  int64_t context = 2400;
  DType dtype = DType::kFloat32;
};

class LayerRank {
 public:
  static constexpr int64_t kHeads = 4, kGroup = 2, kDim = 64;  // heads of the layer
  static constexpr int64_t kSteps = 6;
  static constexpr int64_t kBlocks = 1 + kSteps;

  // Holds the KV heads [first, first + heads).
  LayerRank(int64_t first, int64_t heads, const LayerRankShape& shape = {})
      : heads_(heads),
        context_(shape.context),
        batch_({.activation = shape.dtype,
                .kv = shape.dtype,
                .head_dim = kDim,
                .kv_heads = heads,
                .group = kGroup},
               1, context_, 1) {
    batch_.FillContext(0, context_);
    for (int64_t head = 0; head < heads; ++head) {
      std::mt19937_64 rng(static_cast<uint64_t>(first + head));
      std::normal_distribution<float> normal;
      for (int64_t t = 0; t < context_; ++t) {
        std::byte* key =
            batch_.kv().Token(FakePagedKv::Side::kKey, 0, t, AttentionBatch::kLayer, head);
        for (int64_t i = 0; i < kDim; ++i) batch_.kv().Set(key, i, normal(rng));
      }
    }
    for (int64_t block = 0; block * kPageTokens < context_; ++block) {
      const int64_t tokens = std::min(kPageTokens, context_ - block * kPageTokens);
      KVASIR_CHECK(RebuildBounds(batch_.kv().View(), 0, block, tokens).ok());
      KVASIR_CHECK(RebuildKeyCodes(batch_.kv().View(), 0, block, tokens).ok());
    }
    AddQueries(first, context_ - 224, 64);
    // Steps between two multiples of 64; the second and third queries are much like the first.
    for (int64_t step = 0; step < kSteps; ++step) AddQueries(first, FirstStep() + step, 1);
  }

  AttentionBatch& batch() { return batch_; }
  int64_t heads() const { return heads_; }
  static PolicyNumbers NumbersFor(const Selector& selector, const ReuseRule* rule) {
    PolicyNumbers numbers = {.sink_tokens = 4,
                             .window_tokens = std::max<int64_t>(150, selector.MinWindowTokens()),
                             .budget_tokens = 320};
    if (rule != nullptr) numbers.reach_tokens = ReachTokens(selector, *rule, numbers.reuse);
    return numbers;
  }
  MemoryNeeds NeedsOf(const Selector& selector, const ReuseRule& rule) const {
    return {selector, rule, layout_, kGroup, NumbersFor(selector, &rule), context_};
  }

  // Runs every query tile alone on the CPU, the steps with memory where there is a rule.
  void Run(const Selector& selector, const ReuseRule* rule, LayerRanks* ranks) {
    const PolicyNumbers numbers = NumbersFor(selector, rule);
    std::unique_ptr<SelectionMemory> memory;
    std::vector<RowMemory*> memories;
    if (rule != nullptr) {
      memory = MakeSelectionMemory(NeedsOf(selector, *rule)).value();
      for (int64_t head = 0; head < heads_; ++head) {
        memories.push_back(&memory->row(AttentionBatch::kLayer, head));
      }
    }
    selection = batch_.MakeSelection(selector.MaxEntries(numbers, context_));
    const std::vector<PolicyNumbers> all_numbers(kBlocks, numbers);
    SerialExecutor executor;
    for (int64_t block = 0; block < kBlocks; ++block) {
      SelectParams params = batch_.ParamsForSelect(all_numbers);
      params.tiles = params.tiles.subspan(static_cast<size_t>(block), 1);
      params.numbers = params.numbers.subspan(0, 1);
      params.ranks = ranks;
      PageSelection rows = selection.Rows(block * heads_, heads_);
      const bool remembers = rule != nullptr && block > 0;
      if (remembers) params.memories = memories;
      const absl::Status status = remembers ? SelectReusing(selector, *rule, params, rows, executor)
                                            : selector.Select(params, rows, executor);
      ASSERT_TRUE(status.ok()) << status;
    }
  }

  PageSelection selection;

 private:
  int64_t FirstStep() const { return context_ - 150; }
  void AddQueries(int64_t first, int64_t position, int64_t rows) {
    const int64_t token = batch_.num_tokens();
    batch_.AddBlock(0, position, rows);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t head = 0; head < heads_ * kGroup; ++head) {
        std::mt19937_64 rng(static_cast<uint64_t>(1000 + first * kGroup + head));
        std::mt19937_64 turn(static_cast<uint64_t>((position + r) * 100 + first * kGroup + head));
        std::normal_distribution<float> normal;
        const float share = rows == 1 && position < FirstStep() + 3 ? 0.1f : 2.0f;
        for (int64_t i = 0; i < kDim; ++i) {
          batch_.q(token + r, head)[i] = normal(rng) + share * normal(turn);
        }
      }
    }
  }

  const int64_t heads_;
  const int64_t context_;
  AttentionBatch batch_;
  const KvLayout layout_ = batch_.kv().View().layout;
};

inline void ExpectSameRow(const PageSelection& found, int64_t row, const PageSelection& expected,
                          int64_t expected_row) {
  const SelectionHeader& header = found.header(row);
  const SelectionHeader& other = expected.header(expected_row);
  ASSERT_EQ(header.count, other.count);
  EXPECT_EQ(header.made_at, other.made_at);
  EXPECT_EQ(header.reused_stages, other.reused_stages);
  for (int32_t i = 0; i < header.count; ++i) {
    const SelectionEntry& a = found.list(row)[i];
    const SelectionEntry& b = expected.list(expected_row)[i];
    ASSERT_EQ(a.page, b.page);
    ASSERT_EQ(a.chosen, b.chosen);
    ASSERT_EQ(std::bit_cast<uint32_t>(a.score), std::bit_cast<uint32_t>(b.score));
  }
}

}  // namespace kvasir::kernels
