#include "kernels/dense/rms_norm.h"

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

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr auto kF32 = DType::kFloat32;
constexpr auto kBf16 = DType::kBFloat16;

// One rounding of bfloat16. float32 has the error of the sum of squares.
double RelativeError(DType dtype) { return dtype == kF32 ? 2e-6 : 1.0 / 128; }

std::vector<double> Reference(TestTensor& x, TestTensor& weight, double epsilon) {
  const int64_t dim = x.shape()[1];
  std::vector<double> y;
  for (int64_t row = 0; row < x.shape()[0]; ++row) {
    double sum = 0;
    for (int64_t d = 0; d < dim; ++d) sum += std::pow(x.Get(row * dim + d), 2);
    const double scale = 1 / std::sqrt(sum / static_cast<double>(dim) + epsilon);
    for (int64_t d = 0; d < dim; ++d) {
      y.push_back(weight.Get(d) * (x.Get(row * dim + d) * scale));
    }
  }
  return y;
}

struct Case {
  int64_t rows, dim;
};
const Case kCases[] = {{1, 1}, {1, 7}, {2, 8}, {3, 9}, {5, 16}, {4, 23}, {600, 256}, {3, 4096}};

TEST(RmsNorm, AgreesWithDoubleReferenceForAllShapes) {
  ThreadExecutor executor(3);
  for (DType dtype : {kF32, kBf16}) {
    for (const Case& c : kCases) {
      TestTensor x(dtype, {c.rows, c.dim}), weight(dtype, {c.dim}), y(dtype, {c.rows, c.dim});
      x.Fill(1);
      weight.Fill(2);
      ASSERT_TRUE(RmsNorm({.x = x.view(), .weight = weight.view(), .y = y.view(), .epsilon = 1e-5f},
                          executor)
                      .ok());
      EXPECT_TRUE(AllClose(y.Values(), Reference(x, weight, 1e-5),
                           {.relative = RelativeError(dtype)}, y.shape()));
    }
  }
}

// Hugging Face's LlamaRMSNorm casts to the dtype before it multiplies by the weight. The other
// order rounds about one element in four differently.
TEST(RmsNorm, BFloat16RoundsBeforeTheWeight) {
  SerialExecutor executor;
  const int64_t dim = 16;
  TestTensor x(kBf16, {1, dim}), weight(kBf16, {dim}), y(kBf16, {1, dim});
  x.Fill(1);
  weight.Fill(2);
  ASSERT_TRUE(
      RmsNorm({.x = x.view(), .weight = weight.view(), .y = y.view(), .epsilon = 0}, executor)
          .ok());
  float sum = 0;
  for (int64_t d = 0; d < dim; ++d) sum += x.Get(d) * x.Get(d);
  const float scale = 1 / std::sqrt(sum / static_cast<float>(dim));
  int other_order_differs = 0;
  for (int64_t d = 0; d < dim; ++d) {
    const auto normalized = static_cast<float>(BFloat16(x.Get(d) * scale));
    EXPECT_EQ(y.Get(d), static_cast<float>(BFloat16(weight.Get(d) * normalized))) << d;
    const BFloat16 other(weight.Get(d) * (x.Get(d) * scale));
    other_order_differs += y.Get(d) != static_cast<float>(other) ? 1 : 0;
  }
  EXPECT_GT(other_order_differs, 0);
}

TEST(RmsNorm, MayRunInPlace) {
  SerialExecutor executor;
  TestTensor x(kF32, {4, 64}), weight(kF32, {64}), y(kF32, {4, 64});
  x.Fill(1);
  weight.Fill(2);
  const RmsNormParams apart = {
      .x = x.view(), .weight = weight.view(), .y = y.view(), .epsilon = 1e-5f};
  ASSERT_TRUE(RmsNorm(apart, executor).ok());
  RmsNormParams in_place = apart;
  in_place.y = x.view();
  ASSERT_TRUE(RmsNorm(in_place, executor).ok());
  EXPECT_EQ(x.Values(), y.Values());
}

TEST(RmsNorm, NonFiniteAndHugeRowsFollowTheFormulaAndStayAlone) {
  SerialExecutor executor;
  for (DType dtype : {kF32, kBf16}) {
    TestTensor x(dtype, {5, 16}), weight(dtype, {16}), y(dtype, {5, 16});
    x.Fill(1);
    for (int64_t d = 0; d < 16; ++d) weight.Set(d, 1);
    x.Set(0 * 16 + 3, kNan);
    x.Set(1 * 16 + 3, kInf);
    x.Set(2 * 16 + 3, 1e30f);  // its square overflows
    for (int64_t d = 0; d < 16; ++d) x.Set(3 * 16 + d, 0);
    ASSERT_TRUE(
        RmsNorm({.x = x.view(), .weight = weight.view(), .y = y.view(), .epsilon = 1e-5f}, executor)
            .ok());
    for (int64_t d = 0; d < 16; ++d) {
      EXPECT_TRUE(std::isnan(y.Get(d)));
      EXPECT_TRUE(d == 3 ? std::isnan(y.Get(16 + d)) : y.Get(16 + d) == 0);
      EXPECT_EQ(y.Get(2 * 16 + d), 0);
      EXPECT_EQ(y.Get(3 * 16 + d), 0);
      EXPECT_TRUE(std::isfinite(y.Get(4 * 16 + d)) && y.Get(4 * 16 + d) != 0);
    }
  }
}

void ExpectBitsOfPlainRows(void (*run)(const NormRows&, int64_t, int64_t)) {
  for (DType dtype : {kF32, kBf16}) {
    for (const Case& c : kCases) {
      TestTensor x(dtype, {c.rows, c.dim}), weight(dtype, {c.dim});
      TestTensor plain(dtype, {c.rows, c.dim}), fast(dtype, {c.rows, c.dim});
      x.Fill(1);
      weight.Fill(3);
      NormRows rows = {.x = x.view().data(),
                       .weight = weight.view().data(),
                       .y = plain.view().data(),
                       .dtype = dtype,
                       .dim = c.dim,
                       .epsilon = 1e-5f};
      RunNormRows(rows, 0, c.rows);
      rows.y = fast.view().data();
      run(rows, 0, c.rows);
      EXPECT_EQ(plain.Values(), fast.Values()) << c.rows << " x " << c.dim;
    }
  }
}

TEST(RmsNorm, RowsOverVectorsEqualPlainRowsBitwise) {
  tests::ForEachVectorForm<decltype(RunNormRows)>({.portable = RunNormRows,
                                                   .neon = KVASIR_ON_ARM(RunNormRowsNeon),
                                                   .avx2 = KVASIR_ON_X86(RunNormRowsAvx2),
                                                   .avx512 = KVASIR_ON_X86(RunNormRowsAvx512)},
                                                  ExpectBitsOfPlainRows);
}

TEST(RmsNorm, NoRowsAreNoWorkAndBadArgumentsAreErrors) {
  SerialExecutor executor;
  TestTensor x(kF32, {0, 8}), weight(kF32, {8}), short_weight(kF32, {7}), y(kBf16, {0, 8});
  using absl::StatusCode;
  RmsNormParams params = {.x = x.view(), .weight = weight.view(), .y = x.view(), .epsilon = 1e-5f};
  EXPECT_TRUE(RmsNorm(params, executor).ok());
  params.epsilon = -1;
  EXPECT_EQ(RmsNorm(params, executor).code(), StatusCode::kInvalidArgument);
  params.epsilon = 0;
  params.y = y.view();
  EXPECT_EQ(RmsNorm(params, executor).code(), StatusCode::kInvalidArgument);
  params.y = x.view();
  params.weight = short_weight.view();
  EXPECT_EQ(RmsNorm(params, executor).code(), StatusCode::kInvalidArgument);
  params.weight = TensorView(weight.view().data(), kF32, {8}, Device::kCuda);
  EXPECT_EQ(RmsNorm(params, executor).code(), StatusCode::kUnimplemented);
}

}  // namespace
}  // namespace kvasir::kernels
