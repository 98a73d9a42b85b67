#include "kernels/attention/attention_state.h"

#include <cmath>
#include <gtest/gtest.h>
#include <limits>

#include "kernels/attention/attention_mass.h"

namespace kvasir::kernels {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

TEST(AttentionState, MergeEqualsTheStateOverBothSets) {
  // Keys with logits {1, 3} and {2, -4}.
  AttentionState left = {.max = 3, .sum = std::exp(-2.0f) + 1};
  const AttentionState right = {.max = 2, .sum = 1 + std::exp(-6.0f)};
  const MergeWeights weights = MergeInto(left, right);
  EXPECT_FLOAT_EQ(weights.left, 1);
  EXPECT_FLOAT_EQ(weights.right, std::exp(-1.0f));
  EXPECT_FLOAT_EQ(LogSumExp(left),
                  std::log(std::exp(1.0f) + std::exp(3.0f) + std::exp(2.0f) + std::exp(-4.0f)));
}

TEST(AttentionState, NoKeysIsNeutralOnEitherSide) {
  const AttentionState some = {.max = -5, .sum = 2};
  AttentionState left = some;
  MergeWeights weights = MergeInto(left, AttentionState{});
  EXPECT_EQ(weights.left, 1);
  EXPECT_EQ(weights.right, 0);
  EXPECT_EQ(left.max, some.max);
  EXPECT_EQ(left.sum, some.sum);

  left = {};
  weights = MergeInto(left, some);
  EXPECT_EQ(weights.right, 1);
  EXPECT_EQ(left.max, some.max);
  EXPECT_EQ(left.sum, some.sum);
}

TEST(AttentionState, TwoEmptySidesStayEmptyWithoutNan) {
  AttentionState left;
  const MergeWeights weights = MergeInto(left, AttentionState{});
  EXPECT_EQ(left.max, -kInfinity);
  EXPECT_EQ(left.sum, 0);
  EXPECT_EQ(weights.left * 0.0f + weights.right * 0.0f, 0);
  EXPECT_EQ(LogSumExp(left), -kInfinity);
}

TEST(AttentionState, NanStaysVisibleThroughMerges) {
  for (const AttentionState other : {AttentionState{}, AttentionState{.max = 1, .sum = 1}}) {
    const AttentionState nan = {.max = -kInfinity, .sum = kNan};
    AttentionState left = nan;
    MergeInto(left, other);
    EXPECT_TRUE(std::isnan(left.sum));
    EXPECT_TRUE(std::isnan(LogSumExp(left)));
    left = other;
    MergeInto(left, nan);
    EXPECT_TRUE(std::isnan(left.sum));
  }
}

TEST(AttentionMassKept, IsTheShareOfTheDenseSum) {
  EXPECT_FLOAT_EQ(AttentionMassKept(std::log(2.0f), std::log(8.0f)), 0.25f);
  EXPECT_EQ(AttentionMassKept(3.0f, 3.0f), 1);
  EXPECT_EQ(AttentionMassKept(3.0001f, 3.0f), 1) << "rounding does not exceed 1";
  EXPECT_EQ(AttentionMassKept(-kInfinity, 3.0f), 0) << "nothing was attended to";
  EXPECT_EQ(AttentionMassKept(-kInfinity, -kInfinity), 1) << "there was nothing to attend to";
  EXPECT_TRUE(std::isnan(AttentionMassKept(kNan, 3.0f)));
  EXPECT_TRUE(std::isnan(AttentionMassKept(3.0f, kNan)));
}

}  // namespace
}  // namespace kvasir::kernels
