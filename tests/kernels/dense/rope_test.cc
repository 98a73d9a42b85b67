#include "kernels/rope/rope.h"

#include <cmath>
#include <gtest/gtest.h>
#include <limits>
#include <vector>

#include "kernels/dense/elementwise.h"
#include "tests/support/compare.h"
#include "tests/support/cpu_forms.h"
#include "tests/support/test_tensor.h"
#include "tests/support/thread_executor.h"

namespace kvasir::kernels {
namespace {

using tests::AllClose;
using tests::TestTensor;
using tests::ThreadExecutor;

constexpr auto kF32 = DType::kFloat32;
constexpr auto kBf16 = DType::kBFloat16;

std::vector<double> InverseFrequencies(int64_t half_dim) {
  std::vector<double> inv_freq;
  for (int64_t i = 0; i < half_dim; ++i) {
    inv_freq.push_back(std::pow(5e5, -static_cast<double>(i) / static_cast<double>(half_dim)));
  }
  return inv_freq;
}

struct Problem {
  std::vector<double> inv_freq;
  double attention_scaling;
  std::vector<int64_t> positions;
};

std::vector<double> Reference(TestTensor& x, const Problem& p) {
  const int64_t heads = x.shape()[1], dim = x.shape()[2], half = dim / 2;
  std::vector<double> y = x.Values();
  for (size_t t = 0; t < p.positions.size(); ++t) {
    for (int64_t h = 0; h < heads; ++h) {
      double* head = y.data() + (static_cast<int64_t>(t) * heads + h) * dim;
      for (int64_t i = 0; i < half; ++i) {
        const double angle =
            static_cast<double>(p.positions[t]) * p.inv_freq[static_cast<size_t>(i)];
        const double c = std::cos(angle) * p.attention_scaling;
        const double s = std::sin(angle) * p.attention_scaling;
        const double first = head[i], second = head[i + half];
        head[i] = first * c - second * s;
        head[i + half] = second * c + first * s;
      }
    }
  }
  return y;
}

TEST(Rope, AgreesWithDoubleReferenceAtFarPositions) {
  ThreadExecutor executor(3);
  for (DType dtype : {kF32, kBf16}) {
    for (int64_t half : {1, 5, 8, 32, 64}) {
      const Problem p = {.inv_freq = InverseFrequencies(half),
                         .attention_scaling = half == 32 ? 1.25 : 1.0,
                         .positions = {0, 1, 8191, 3, int64_t{1} << 33, -5, 3'000'000}};
      const auto tokens = static_cast<int64_t>(p.positions.size());
      TestTensor x(dtype, {tokens, 3, 2 * half});
      x.Fill(1);
      const std::vector<double> expected = Reference(x, p);
      RopeTable table(p.inv_freq, p.attention_scaling);
      table.SetPositions(p.positions, executor);
      ASSERT_TRUE(ApplyRope(table, x.view(), executor).ok());
      EXPECT_TRUE(AllClose(x.Values(), expected,
                           {.absolute = 1e-5, .relative = dtype == kF32 ? 1e-6 : 1.0 / 256},
                           x.shape()));
    }
  }
}

TEST(RopePositions, RotatesAsTheTableOfAStepDoes) {
  ThreadExecutor executor(2);
  for (const DType dtype : {kF32, kBf16}) {
    RopePositions rope(InverseFrequencies(20), 1.3);
    for (const int64_t first : {0, 5, 3000}) {  // the table grows in between
      const std::vector<int64_t> positions = {first, first + 1, first + 2};
      TestTensor expected(dtype, {3, 1, 40}), rotated(dtype, {3, 1, 40});
      expected.Fill(7);
      rotated.Fill(7);
      RopeTable table(InverseFrequencies(20), 1.3);
      table.SetPositions(positions, executor);
      ASSERT_TRUE(ApplyRope(table, expected.view(), executor).ok());
      rope.Reserve(first + 3, executor);
      rope.Rotate(rotated.view().data(), dtype, 3, first);
      EXPECT_EQ(rotated.Values(), expected.Values());
    }
  }
}

// Attention reads q . k, which must depend only on the distance of the positions.
TEST(Rope, ScoresDependOnDistanceOnly) {
  SerialExecutor executor;
  const int64_t half = 32;
  const auto score = [&](int64_t q_position, int64_t k_position) {
    TestTensor qk(kF32, {2, 1, 2 * half});
    for (int64_t i = 0; i < qk.size(); ++i) qk.Set(i, std::sin(static_cast<float>(3 * i)));
    RopeTable table(InverseFrequencies(half), 1.0);
    table.SetPositions(std::vector<int64_t>{q_position, k_position}, executor);
    EXPECT_TRUE(ApplyRope(table, qk.view(), executor).ok());
    double sum = 0;
    for (int64_t i = 0; i < 2 * half; ++i) sum += qk.Get(i) * qk.Get(2 * half + i);
    return sum;
  };
  EXPECT_NEAR(score(10, 3), score(1'000'010, 1'000'003), 1e-4);
  EXPECT_GT(std::abs(score(10, 3) - score(10, 4)), 1e-2);
}

TEST(Rope, TableIsReplacedByEachStepWhateverItsSize) {
  SerialExecutor executor;
  const Problem p = {.inv_freq = InverseFrequencies(4), .attention_scaling = 1, .positions = {}};
  RopeTable table(p.inv_freq, p.attention_scaling);
  for (size_t tokens : {3u, 1u, 4000u, 2u}) {
    Problem step = p;
    for (size_t t = 0; t < tokens; ++t) step.positions.push_back(static_cast<int64_t>(tokens + t));
    table.SetPositions(step.positions, executor);
    EXPECT_EQ(table.num_tokens(), static_cast<int64_t>(tokens));
    TestTensor x(kF32, {table.num_tokens(), 2, 8});
    x.Fill(1);
    const std::vector<double> expected = Reference(x, step);
    ASSERT_TRUE(ApplyRope(table, x.view(), executor).ok());
    EXPECT_TRUE(AllClose(x.Values(), expected, {.absolute = 1e-5}, x.shape()));
  }
}

TEST(Rope, NanStaysInItsPair) {
  SerialExecutor executor;
  RopeTable table(InverseFrequencies(8), 1.0);
  table.SetPositions(std::vector<int64_t>{3}, executor);
  TestTensor x(kBf16, {1, 1, 16});
  x.Fill(1);
  x.Set(2, std::numeric_limits<float>::quiet_NaN());
  ASSERT_TRUE(ApplyRope(table, x.view(), executor).ok());
  for (int64_t i = 0; i < 16; ++i) EXPECT_EQ(std::isnan(x.Get(i)), i == 2 || i == 10) << i;
}

void ExpectBitsOfPlainTokens(void (*run)(const RopeTokens&, int64_t, int64_t)) {
  SerialExecutor executor;
  for (DType dtype : {kF32, kBf16}) {
    for (int64_t half : {1, 7, 8, 16, 20, 64}) {
      RopeTable table(InverseFrequencies(half), 1.1);
      table.SetPositions(std::vector<int64_t>{9, 100, 7777}, executor);
      TestTensor plain(dtype, {3, 5, 2 * half});
      plain.Fill(1);
      TestTensor fast = plain;
      RopeTokens tokens = {.x = plain.view().data(),
                           .cos = table.cos(),
                           .sin = table.sin(),
                           .dtype = dtype,
                           .heads = 5,
                           .half_dim = half};
      RunRopeTokens(tokens, 0, 3);
      tokens.x = fast.view().data();
      run(tokens, 0, 3);
      EXPECT_EQ(plain.Values(), fast.Values()) << half;
    }
  }
}

TEST(Rope, TokensOverVectorsEqualPlainTokensBitwise) {
  tests::ForEachVectorForm<decltype(RunRopeTokens)>({.portable = RunRopeTokens,
                                                     .neon = KVASIR_ON_ARM(RunRopeTokensNeon),
                                                     .avx2 = KVASIR_ON_X86(RunRopeTokensAvx2),
                                                     .avx512 = KVASIR_ON_X86(RunRopeTokensAvx512)},
                                                    ExpectBitsOfPlainTokens);
}

TEST(Rope, NoTokensAreNoWorkAndBadArgumentsAreErrors) {
  SerialExecutor executor;
  RopeTable table(InverseFrequencies(4), 1.0);
  TestTensor none(kF32, {0, 2, 8}), one(kF32, {1, 2, 8}), odd(kF32, {0, 2, 6});
  EXPECT_TRUE(ApplyRope(table, none.view(), executor).ok());
  using absl::StatusCode;
  EXPECT_EQ(ApplyRope(table, one.view(), executor).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(ApplyRope(table, odd.view(), executor).code(), StatusCode::kInvalidArgument);
  const TensorView half_floats(none.view().data(), DType::kFloat16, {0, 2, 8});
  EXPECT_EQ(ApplyRope(table, half_floats, executor).code(), StatusCode::kInvalidArgument);
  const TensorView on_gpu(none.view().data(), kF32, {0, 2, 8}, Device::kCuda);
  EXPECT_EQ(ApplyRope(table, on_gpu, executor).code(), StatusCode::kUnimplemented);
}

}  // namespace
}  // namespace kvasir::kernels
