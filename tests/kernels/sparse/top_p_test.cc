// Cases that oracle_test.cc does not cover: rows that stay unchanged, hostile numbers, errors.
#include <array>
#include <bit>
#include <gtest/gtest.h>
#include <limits>
#include <memory>
#include <vector>

#include "kernels/append/key_codes.h"
#include "kernels/sparse/common/selection_accounting.h"
#include "kernels/sparse/policy.h"
#include "kernels/sparse/top_p/top_p_pruner.h"
#include "tests/support/attention_batch.h"

namespace kvasir::kernels {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Quest's choice in a random context, pruned.
class TopPTest : public ::testing::Test {
 protected:
  TopPTest() {
    batch_.FillContext(0, 2048);
    batch_.AddBlock(0, 2000, 1);
    batch_.AddBlock(0, 1984, 16);
    batch_.AddBlock(0, 300, 1);  // rule R2
  }

  std::vector<PolicyNumbers> Numbers(float top_p) const {
    return {3, {.sink_tokens = 10, .window_tokens = 50, .budget_tokens = 512, .top_p = top_p}};
  }
  void Select() {
    const std::unique_ptr<Selector> quest = MakeSelector("quest").value();
    const std::vector<PolicyNumbers> numbers = Numbers(1);
    selection_ = batch_.MakeSelection(8);
    ASSERT_TRUE(quest->Select(batch_.ParamsForSelect(numbers), selection_, executor_).ok());
    before_.assign(selection_.entries, selection_.entries + 3 * 2 * 8);
    for (int64_t row = 0; row < 6; ++row) before_live_[static_cast<size_t>(row)] = Live(row);
  }
  absl::Status Prune(float top_p) {
    const std::vector<PolicyNumbers> numbers = Numbers(top_p);
    return TopPPruner().Prune(batch_.ParamsForSelect(numbers), selection_, executor_);
  }
  // Live tokens between sink and window.
  int64_t Live(int64_t row) const {
    const SelectionHeader& header = selection_.header(row);
    int64_t live = 0;
    for (int32_t i = 0; i < header.count; ++i) {
      const SelectionEntry& entry = selection_.list(row)[i];
      const int64_t start = entry.page * kPageTokens;
      live += std::popcount(entry.live &
                            TokenMask(header.sink_end - start, header.window_begin - start));
    }
    return live;
  }

  AttentionBatch batch_{{.head_dim = 64}, 1, 2048, 71};
  SerialExecutor executor_;
  PageSelection selection_;
  std::vector<SelectionEntry> before_;
  std::array<int64_t, 6> before_live_ = {};
};

TEST_F(TopPTest, AllMassIsTheSelectorAlone) {
  for (const float top_p : {1.0f, 1.5f, kNan}) {
    Select();
    ASSERT_TRUE(Prune(top_p).ok());
    for (int64_t row = 0; row < 6; ++row) {
      for (int32_t i = 0; i < selection_.header(row).count; ++i) {
        EXPECT_EQ(selection_.list(row)[i].live, selection_.list(row)[i].chosen);
      }
    }
  }
}

TEST_F(TopPTest, LessMassIsASubsetOfMore) {
  std::vector<uint64_t> wider(8, ~uint64_t{0});
  int64_t previous = 513;
  for (const float top_p : {0.99f, 0.9f, 0.7f, 0.3f, 1e-6f}) {
    Select();
    ASSERT_TRUE(Prune(top_p).ok());
    for (int32_t i = 0; i < 8; ++i) {
      const SelectionEntry& entry = selection_.list(0)[i];
      EXPECT_EQ(entry.chosen, before_[static_cast<size_t>(i)].chosen);
      EXPECT_EQ(entry.live & ~wider[static_cast<size_t>(i)], 0u);
      wider[static_cast<size_t>(i)] = entry.live;
    }
    EXPECT_LT(Live(0), previous);
    previous = Live(0);
  }
  EXPECT_EQ(previous, 0) << "sink and window hold enough";
}

TEST_F(TopPTest, RowsOfSeveralQueriesAndDenseRowsStay) {
  Select();
  ASSERT_EQ(selection_.header(4).kind, SelectionHeader::Kind::kAll);
  ASSERT_TRUE(Prune(0.1f).ok());
  EXPECT_LT(Live(0), before_live_[0]);
  EXPECT_EQ(Live(2), before_live_[2]);
  EXPECT_EQ(Live(3), before_live_[3]);
  EXPECT_EQ(selection_.header(4).kind, SelectionHeader::Kind::kAll);
}

TEST_F(TopPTest, ANanKeyIsKeptAndCountsForNothing) {
  Select();
  const int64_t token = selection_.list(0)[3].page * kPageTokens + 5;
  std::byte* key = batch_.kv().Token(FakePagedKv::Side::kKey, 0, token, AttentionBatch::kLayer, 0);
  batch_.kv().Set(key, 7, kNan);
  ASSERT_TRUE(RebuildKeyCodes(batch_.kv().View(), 0, token / kPageTokens, 64).ok());
  ASSERT_TRUE(Prune(1e-6f).ok());
  EXPECT_EQ(Live(0), 1);
  EXPECT_EQ(selection_.list(0)[3].live >> 5 & 1, 1u);
  EXPECT_EQ(Live(1), 0) << "the other head has a key of its own";
}

TEST_F(TopPTest, ANanQueryKeepsEverything) {
  Select();
  batch_.q(0, 1)[0] = kNan;
  ASSERT_TRUE(Prune(0.1f).ok());
  EXPECT_EQ(Live(0), before_live_[0]);
  EXPECT_LT(Live(1), before_live_[1]);
}

TEST_F(TopPTest, PrunedPagesAreCounted) {
  Select();
  const PageCounts before =
      CountPages(selection_.header(0), selection_.list(0), 2000, SkipReason::kSelectedOut);
  ASSERT_EQ(before.pruned, 0);
  ASSERT_TRUE(Prune(1e-6f).ok());
  const PageCounts after =
      CountPages(selection_.header(0), selection_.list(0), 2000, SkipReason::kSelectedOut);
  EXPECT_GT(after.pruned, 5);
  EXPECT_EQ(after.attended + after.selected_out + after.pruned, after.total);
  EXPECT_EQ(after.selected_out, before.selected_out);
  EXPECT_EQ(after.attended, before.attended - after.pruned);
}

TEST_F(TopPTest, RefusesWhatItCannotDo) {
  Select();
  for (const float top_p : {0.0f, -1.0f}) {
    EXPECT_EQ(Prune(top_p).code(), absl::StatusCode::kInvalidArgument);
  }
  const std::vector<PolicyNumbers> numbers = Numbers(0.5f);
  SelectParams p = batch_.ParamsForSelect(numbers);
  p.kv.key_codes = nullptr;
  EXPECT_EQ(TopPPruner().Prune(p, selection_, executor_).code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(MakePruner("top_q").status().message(),
            "unknown pruner 'top_q'; the pruners are top_p");
}

}  // namespace
}  // namespace kvasir::kernels
