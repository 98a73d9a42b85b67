#include "kernels/dense/random_fill.h"

#include <cmath>
#include <gtest/gtest.h>
#include <vector>

#include "tests/support/test_tensor.h"
#include "tests/support/thread_executor.h"

namespace kvasir::kernels {
namespace {

using tests::TestTensor;
using tests::ThreadExecutor;

std::vector<double> Fill(TestTensor tensor, RandomFillParams params) {
  ThreadExecutor executor(2);
  params.y = tensor.view();
  EXPECT_TRUE(FillRandom(params, executor).ok());
  return tensor.Values();
}

TEST(RandomFillTest, NumbersAreUniformAboutTheirMean) {
  const std::vector<double> values =
      Fill(TestTensor(DType::kFloat32, {400, 500}),
           {.y = {}, .seed = 7, .mean = 3, .spread = 2, .width = 500});
  double sum = 0, squares = 0, least = 1e9, largest = -1e9;
  for (const double value : values) {
    sum += value - 3;
    squares += (value - 3) * (value - 3);
    least = std::min(least, value);
    largest = std::max(largest, value);
  }
  const double n = static_cast<double>(values.size());
  EXPECT_NEAR(sum / n, 0, 0.01);
  EXPECT_NEAR(squares / n, 4.0 / 3, 0.02);
  EXPECT_NEAR(least, 1, 0.001);
  EXPECT_NEAR(largest, 5, 0.001);
}

TEST(RandomFillTest, SeedsGiveOtherNumbers) {
  const RandomFillParams one = {.y = {}, .seed = 1, .spread = 1, .width = 64};
  const RandomFillParams two = {.y = {}, .seed = 2, .spread = 1, .width = 64};
  const TestTensor tensor(DType::kFloat32, {8, 64});
  EXPECT_EQ(Fill(tensor, one), Fill(tensor, one));
  EXPECT_NE(Fill(tensor, one), Fill(tensor, two));
}

// Ranks hold slices of one model.
TEST(RandomFillTest, ASliceHasTheNumbersOfTheWhole) {
  constexpr int64_t kRows = 9, kCols = 21;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const RandomFillParams params = {.y = {}, .seed = 5, .mean = 1, .spread = 1, .width = kCols};
    const std::vector<double> whole = Fill(TestTensor(dtype, {kRows, kCols}), params);
    RandomFillParams slice = params;
    slice.first_row = 2;
    slice.first_col = 4;
    const std::vector<double> part = Fill(TestTensor(dtype, {3, 17}), slice);
    for (int64_t row = 0; row < 3; ++row) {
      for (int64_t col = 0; col < 17; ++col) {
        EXPECT_EQ(part[static_cast<size_t>(row * 17 + col)],
                  whole[static_cast<size_t>((row + 2) * kCols + col + 4)]);
      }
    }
  }
}

TEST(RandomFillTest, WrongShapesAreRefused) {
  SerialExecutor executor;
  TestTensor cube(DType::kFloat32, {2, 2, 2}), ids(DType::kInt32, {4}), ok(DType::kFloat32, {2, 4});
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  EXPECT_EQ(FillRandom({.y = cube.view(), .width = 2}, executor).code(), kInvalid);
  EXPECT_EQ(FillRandom({.y = ids.view(), .width = 1}, executor).code(), kInvalid);
  EXPECT_EQ(FillRandom({.y = ok.view(), .width = 3}, executor).code(), kInvalid);
  EXPECT_EQ(FillRandom({.y = ok.view(), .first_row = -1, .width = 4}, executor).code(), kInvalid);
  EXPECT_TRUE(FillRandom({.y = ok.view(), .width = 4}, executor).ok());
}

}  // namespace
}  // namespace kvasir::kernels
