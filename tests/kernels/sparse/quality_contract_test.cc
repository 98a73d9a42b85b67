#include "kernels/sparse/quality/quality_contract.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <gtest/gtest.h>
#include <memory>
#include <string>
#include <vector>

#include "kernels/sparse/policy.h"
#include "kernels/sparse/quality/mass_estimate.h"
#include "tests/support/attention_batch.h"

namespace kvasir::kernels {
namespace {

constexpr int64_t kContext = 2048;
constexpr int64_t kHeads = 2, kGroup = 2;

// One selector's choice in a random context, where random keys spread the mass widely.
class QualityContractTest : public ::testing::TestWithParam<std::string> {
 protected:
  QualityContractTest() {
    batch_.FillContext(0, kContext);
    batch_.AddBlock(0, 2000, 1);
    batch_.AddBlock(0, 1500, 1);
    batch_.AddBlock(0, 1984, 16);
    batch_.AddBlock(0, 300, 1);  // rule R2
  }

  PolicyNumbers Numbers(float min_mass, OnViolation on_violation,
                        int64_t max_budget_tokens = 0) const {
    return {.sink_tokens = 10,
            .window_tokens = std::max<int64_t>(64, selector_->MinWindowTokens()),
            .budget_tokens = 256,
            .quality = {.min_mass = min_mass,
                        .on_violation = on_violation,
                        .max_budget_tokens = max_budget_tokens}};
  }
  void Keep(const PolicyNumbers& own, const Pruner* pruner = nullptr) {
    Keep(std::vector<PolicyNumbers>(4, own), pruner);
  }
  void Keep(const std::vector<PolicyNumbers>& numbers, const Pruner* pruner = nullptr) {
    int64_t capacity = 0;
    for (PolicyNumbers n : numbers) {
      n.budget_tokens = LargestBudget(n, kContext);
      capacity = std::max(capacity, selector_->MaxEntries(n, kContext));
    }
    selection_ = batch_.MakeSelection(capacity);
    const SelectParams params = batch_.ParamsForSelect(numbers);
    ASSERT_TRUE(selector_->Select(params, selection_, executor_).ok());
    if (pruner != nullptr) {
      ASSERT_TRUE(pruner->Prune(params, selection_, executor_).ok());
    }
    before_.clear();
    for (int64_t row = 0; row < selection_.num_rows; ++row) before_.push_back(Tokens(row));
    const absl::Status kept =
        keeper_.Keep({.selector = *selector_, .pruner = pruner}, params, selection_, executor_);
    ASSERT_TRUE(kept.ok()) << kept;
  }
  // Tokens that the row attends to.
  std::vector<int64_t> Tokens(int64_t row) const {
    std::vector<int64_t> tokens;
    const int64_t position = batch_.blocks()[static_cast<size_t>(row / kHeads)].first_position;
    for (SelectedPages walk(selection_.header(row), selection_.list(row), position); walk.valid();
         walk.Next()) {
      for (uint64_t mask = walk.mask(); mask != 0; mask &= mask - 1) {
        tokens.push_back(walk.page() * kPageTokens + std::countr_zero(mask));
      }
    }
    return tokens;
  }
  // The largest that is fulfilled by a row which keeps `mass`.
  static float WishOf(float mass) { return 1 - (1 - mass) * kUnreadMassFactor; }
  ContractOutcome outcome(int64_t row) const {
    return keeper_.outcomes()[static_cast<size_t>(row)];
  }
  float mass(int64_t row) const {  // the least of the group
    const auto masses = keeper_.masses().subspan(static_cast<size_t>(row * kGroup), kGroup);
    return *std::min_element(masses.begin(), masses.end());
  }

  std::unique_ptr<Selector> selector_ = MakeSelector(GetParam(), Options()).value();
  AttentionBatch batch_{{.head_dim = 64}, 1, kContext, 23};
  SerialExecutor executor_;
  PageSelection selection_;
  ContractKeeper keeper_;
  std::vector<std::vector<int64_t>> before_;

 private:
  static MethodOptions Options() {
    if (GetParam() != "infinitehip") return {};
    return {{.name = "preset", .value = "5k"}};
  }
};

INSTANTIATE_TEST_SUITE_P(Selectors, QualityContractTest,
                         ::testing::Values("quest", "tokenselect", "hip", "infinitehip"),
                         [](const auto& param) { return param.param; });

TEST_P(QualityContractTest, RowsWithoutAContractStayAsTheyAre) {
  Keep(Numbers(0, OnViolation::kDense));
  for (int64_t row = 0; row < 8; ++row) {
    EXPECT_EQ(outcome(row), ContractOutcome::kNone);
    EXPECT_EQ(Tokens(row), before_[static_cast<size_t>(row)]);
  }
  Keep(Numbers(0.999f, OnViolation::kDense));
  for (const int64_t row : {4, 5, 6, 7}) {  // several queries; all
    EXPECT_EQ(outcome(row), ContractOutcome::kNone);
    EXPECT_EQ(Tokens(row), before_[static_cast<size_t>(row)]);
    EXPECT_TRUE(std::isnan(keeper_.masses()[static_cast<size_t>(row * kGroup)]));
  }
}

TEST_P(QualityContractTest, WhatKeepsEnoughStaysAsItIs) {
  Keep(Numbers(0.05f, OnViolation::kDense));
  for (int64_t row = 0; row < 4; ++row) {
    EXPECT_EQ(outcome(row), ContractOutcome::kKept);
    EXPECT_GT(mass(row), 0.05f);
    EXPECT_EQ(Tokens(row), before_[static_cast<size_t>(row)]);
  }
}

TEST_P(QualityContractTest, ReportingChangesNothing) {
  Keep(Numbers(0.99f, OnViolation::kReport));
  for (int64_t row = 0; row < 4; ++row) {
    EXPECT_EQ(outcome(row), ContractOutcome::kMissed);
    EXPECT_LT(mass(row), 0.99f);
    EXPECT_EQ(Tokens(row), before_[static_cast<size_t>(row)]);
  }
}

TEST_P(QualityContractTest, RowsInViolationTurnDenseAndNoOthers) {
  Keep(Numbers(0.5f, OnViolation::kReport));
  // Between the rows: what the better one keeps, the worse does not.
  std::vector<float> masses;
  for (int64_t row = 0; row < 4; ++row) masses.push_back(mass(row));
  std::sort(masses.begin(), masses.end());
  const float middle = (masses[1] + masses[2]) / 2;
  Keep(Numbers(WishOf(middle), OnViolation::kDense));
  int64_t dense = 0;
  for (int64_t row = 0; row < 4; ++row) {
    if (outcome(row) == ContractOutcome::kDense) {
      ++dense;
      EXPECT_EQ(mass(row), 1.0f);
      EXPECT_EQ(std::ssize(Tokens(row)), row < 2 ? 2001 : 1501);
    } else {
      EXPECT_EQ(outcome(row), ContractOutcome::kKept);
      EXPECT_EQ(Tokens(row), before_[static_cast<size_t>(row)]);
    }
  }
  EXPECT_GE(dense, 2);
  EXPECT_LT(dense, 4);
}

TEST_P(QualityContractTest, WideningEndsWhenEnoughIsKept) {
  PolicyNumbers wide = Numbers(0.5f, OnViolation::kReport);
  wide.budget_tokens = 1024;
  Keep(wide);
  float wish = 1;
  std::vector<std::vector<int64_t>> of_1024;
  for (int64_t row = 0; row < 4; ++row) {
    wish = std::min(wish, WishOf(mass(row)) - 0.001f);
    of_1024.push_back(Tokens(row));
  }
  wide.budget_tokens = 512;
  Keep(wide);
  std::vector<std::vector<int64_t>> of_512;
  std::vector<float> mass_of_512;
  for (int64_t row = 0; row < 4; ++row) {
    of_512.push_back(Tokens(row));
    mass_of_512.push_back(mass(row));
  }
  Keep(Numbers(wish, OnViolation::kWiden));
  for (size_t i = 0; i < 4; ++i) {
    const auto row = static_cast<int64_t>(i);
    if (outcome(row) == ContractOutcome::kKept) continue;  // a short context
    ASSERT_EQ(outcome(row), ContractOutcome::kWidened);
    EXPECT_GE(mass(row), wish);
    EXPECT_EQ(Tokens(row), WishOf(mass_of_512[i]) >= wish ? of_512[i] : of_1024[i]);
  }
  EXPECT_EQ(outcome(0), ContractOutcome::kWidened);
}

TEST_P(QualityContractTest, WideningEndsWithTheLargestBudget) {
  Keep(Numbers(0.9999f, OnViolation::kWiden, 700));
  for (int64_t row = 0; row < 4; ++row) {
    EXPECT_EQ(outcome(row), ContractOutcome::kMissed);
    EXPECT_GT(Tokens(row).size(), before_[static_cast<size_t>(row)].size() + 300);
    EXPECT_LE(std::ssize(Tokens(row)), 10 + 700 + 64 + 128 + 64);
  }
  Keep(Numbers(0.9999f, OnViolation::kWiden));  // to the whole context
  for (int64_t row = 0; row < 4; ++row) {
    EXPECT_EQ(outcome(row), ContractOutcome::kWidened);
    EXPECT_GE(mass(row), 0.9999f);
  }
}

TEST_P(QualityContractTest, WidenedSelectionsArePruned) {
  const std::unique_ptr<Pruner> pruner = MakePruner("top_p").value();
  PolicyNumbers numbers = Numbers(0.7f, OnViolation::kWiden, 1024);
  Keep(numbers);
  std::vector<size_t> unpruned;
  for (int64_t row = 0; row < 4; ++row) unpruned.push_back(Tokens(row).size());
  numbers.top_p = 0.8f;
  Keep(numbers, pruner.get());
  for (int64_t row = 0; row < 4; ++row) {
    ASSERT_NE(outcome(row), ContractOutcome::kKept);
    int64_t live = 0, chosen = 0;
    for (int32_t i = 0; i < selection_.header(row).count; ++i) {
      live += std::popcount(selection_.list(row)[i].live);
      chosen += std::popcount(selection_.list(row)[i].chosen);
    }
    EXPECT_LT(live, chosen);
  }
}

// The outcome of a row does not depend on the rows beside it and their contracts.
TEST_P(QualityContractTest, ARowIsWhatItIsAlone) {
  const PolicyNumbers widened = Numbers(0.7f, OnViolation::kWiden);
  Keep(widened);
  const std::vector<int64_t> beside = Tokens(0);
  const float mass_beside = mass(0);
  Keep({widened, Numbers(0.99f, OnViolation::kDense), Numbers(0, OnViolation::kReport),
        Numbers(0, OnViolation::kReport)});
  EXPECT_EQ(Tokens(0), beside);
  EXPECT_EQ(mass(0), mass_beside);
  EXPECT_EQ(outcome(2), ContractOutcome::kDense);
}

TEST(LargestBudgetTest, IsThePolicysUnlessItMayBeWidened) {
  PolicyNumbers numbers = {.budget_tokens = 100};
  EXPECT_EQ(LargestBudget(numbers, 1000), 100);
  numbers.quality = {.min_mass = 0.9f, .on_violation = OnViolation::kDense};
  EXPECT_EQ(LargestBudget(numbers, 1000), 100);
  numbers.quality.on_violation = OnViolation::kWiden;
  EXPECT_EQ(LargestBudget(numbers, 1000), 1000);
  EXPECT_EQ(LargestBudget(numbers, 50), 100);
  numbers.quality.max_budget_tokens = 400;
  EXPECT_EQ(LargestBudget(numbers, 1000), 400);
  numbers.quality.min_mass = 0;
  EXPECT_EQ(LargestBudget(numbers, 1000), 100);
}

}  // namespace
}  // namespace kvasir::kernels
