#include "kernels/gemm/gemm_cuda.h"

#include <cmath>
#include <gtest/gtest.h>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/compare.h"
#include "tests/support/device_memory.h"
#include "tests/support/test_tensor.h"

namespace kvasir::kernels {
namespace {

using tests::AllClose;
using tests::TestTensor;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr auto kF32 = DType::kFloat32;
constexpr auto kBf16 = DType::kBFloat16;

struct Dtypes {
  DType input, output;
};

class CudaLinearTest : public testing::TestWithParam<Dtypes> {
 protected:
  void SetUp() override {
    if (!HasGpu()) GTEST_SKIP() << "no GPU on this machine";
    lt_ = std::make_unique<CublasLt>(CublasLt::Create().value());
    workspace_ = DeviceBuffer::Allocate(CudaLinear::kWorkspaceBytes).value();
  }
  static PackedLinear::Options Options() {
    return {.input = GetParam().input, .output = GetParam().output};
  }
  // y = linear(x), x and y a row behind an aligned address.
  absl::Status Run(CudaLinear& linear, TestTensor& x, TestTensor& y) {
    const auto row = [](TestTensor& tensor, DType dtype) {
      return tensor.shape()[1] * static_cast<int64_t>(DTypeSize(dtype));
    };
    KVASIR_ASSIGN_OR_RETURN(const TensorView device_x,
                            memory_.Copy(x.view(), row(x, GetParam().input)));
    KVASIR_ASSIGN_OR_RETURN(const TensorView device_y,
                            memory_.Copy(y.view(), row(y, GetParam().output)));
    KVASIR_RETURN_IF_ERROR(linear.Run({.x = device_x, .y = device_y}, workspace_.data(), nullptr));
    return DeviceMemory::Fetch(device_y, y.view());
  }

  std::unique_ptr<CublasLt> lt_;
  DeviceBuffer workspace_;
  DeviceMemory memory_;
};

INSTANTIATE_TEST_SUITE_P(Dtypes, CudaLinearTest,
                         testing::Values(Dtypes{kF32, kF32}, Dtypes{kBf16, kBf16},
                                         Dtypes{kBf16, kF32}),
                         [](const auto& param) {
                           return std::string(DTypeName(param.param.input).data()) + "_to_" +
                                  std::string(DTypeName(param.param.output).data());
                         });

// Two parts, of which the first has a bias, or none.
TEST_P(CudaLinearTest, AgreesWithDoubleReferenceForAllShapes) {
  struct Case {
    int64_t m, n, k;
  };
  const Case cases[] = {{1, 64, 64},   {1, 1, 1},      {3, 5, 7},      {2, 130, 33},  {17, 48, 129},
                        {64, 96, 128}, {65, 257, 100}, {200, 64, 512}, {5, 256, 4096}};
  for (const Case& c : cases) {
    for (const bool with_bias : {false, true}) {
      SCOPED_TRACE(testing::Message()
                   << c.m << " x " << c.n << " x " << c.k << (with_bias ? " with bias" : ""));
      TestTensor x(GetParam().input, {c.m, c.k}), y(GetParam().output, {c.m, c.n});
      TestTensor w1(kBf16, {c.n, c.k}), w2(kBf16, {3, c.k}), bias(kBf16, {c.n});
      TestTensor both(GetParam().output, {c.m, c.n + 3});
      x.Fill(1);
      w1.Fill(2);
      w2.Fill(3);
      bias.Fill(4);
      for (int64_t i = 0; i < both.size(); ++i) both.Set(i, kNan);
      const PackedLinear::Part parts[] = {
          {.weight = w1.view(), .bias = with_bias ? bias.view() : TensorView()},
          {.weight = w2.view()}};
      auto linear = CudaLinear::Create(*lt_, parts, Options());
      ASSERT_TRUE(linear.ok()) << linear.status();
      ASSERT_EQ(linear->out_features(), c.n + 3);
      const absl::Status status = Run(*linear, x, both);
      ASSERT_TRUE(status.ok()) << status;
      std::vector<double> expected;
      double largest = 0, largest_bias = 0;
      for (double value : bias.Values()) largest_bias = std::max(largest_bias, std::abs(value));
      for (int64_t row = 0; row < c.m; ++row) {
        for (int64_t column = 0; column < c.n + 3; ++column) {
          TestTensor& w = column < c.n ? w1 : w2;
          const int64_t w_row = column < c.n ? column : column - c.n;
          double sum = with_bias && column < c.n ? bias.Get(column) : 0.0f;
          for (int64_t i = 0; i < c.k; ++i) {
            const double product = double{x.Get(row * c.k + i)} * double{w.Get(w_row * c.k + i)};
            largest = std::max(largest, std::abs(product));
            sum += product;
          }
          expected.push_back(sum);
        }
      }
      double rounding = largest * std::sqrt(static_cast<double>(c.k)) * 1e-6;
      // The sum may have been rounded before the bias brought it near to zero.
      if (with_bias && GetParam().output == kBf16) rounding += largest_bias / 256;
      EXPECT_TRUE(
          AllClose(both.Values(), expected,
                   {.absolute = rounding, .relative = GetParam().output == kF32 ? 1e-6 : 1.0 / 128},
                   both.shape()));
    }
  }
}

TEST_P(CudaLinearTest, ANanStaysInItsRow) {
  TestTensor x(GetParam().input, {9, 128}), w(kF32, {72, 128}), y(GetParam().output, {9, 72});
  x.Fill(5);
  w.Fill(6);
  x.Set(4 * 128 + 17, kNan);
  const PackedLinear::Part part = {.weight = w.view()};
  auto linear = CudaLinear::Create(*lt_, {&part, 1}, Options());
  ASSERT_TRUE(linear.ok()) << linear.status();
  ASSERT_TRUE(Run(*linear, x, y).ok());
  for (int64_t i = 0; i < y.size(); ++i) EXPECT_EQ(std::isnan(y.Get(i)), i / 72 == 4) << i;
}

TEST_P(CudaLinearTest, EmptyBatchesAndWrongShapes) {
  TestTensor w(kF32, {8, 16}), x(GetParam().input, {0, 16}), y(GetParam().output, {0, 8});
  TestTensor wrong(GetParam().input, {0, 15});
  const PackedLinear::Part part = {.weight = w.view()};
  auto linear = CudaLinear::Create(*lt_, {&part, 1}, Options());
  ASSERT_TRUE(linear.ok()) << linear.status();
  EXPECT_TRUE(Run(*linear, x, y).ok());
  EXPECT_EQ(Run(*linear, wrong, y).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(linear->Run({.x = x.view(), .y = y.view()}, workspace_.data(), nullptr).code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace kvasir::kernels
