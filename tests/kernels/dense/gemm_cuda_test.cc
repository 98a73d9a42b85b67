#include "kernels/gemm/gemm_cuda.h"

#include <cmath>
#include <cstring>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <iostream>
#include <limits>
#include <vector>

#include "kernels/dense/dense_cuda.h"
#include "kernels/gemm/gemm_few_rows.h"
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

// A layer of bfloat16, run as a whole and in parts.
class FewRowsTest : public testing::Test {
 protected:
  using After = LinearParams::After;
  struct Case {
    int64_t rows, outputs, k;
  };
  // Tiles and steps that are not full, fewer steps than warps, and more rows than one row's room.
  static constexpr Case kCases[] = {{1, 8, 8},    {1, 24, 256},   {2, 13, 264},  {3, 40, 1096},
                                    {8, 72, 512}, {5, 1100, 136}, {2, 12, 8192}, {3, 9, 9216}};

  void SetUp() override {
    if (!HasGpu()) GTEST_SKIP() << "no GPU on this machine";
    lt_ = std::make_unique<CublasLt>(CublasLt::Create().value());
    workspace_ = DeviceBuffer::Allocate(CudaLinear::kWorkspaceBytes).value();
  }
  TensorView OnDevice(TestTensor& tensor, uint32_t seed) {
    tensor.Fill(seed);
    return memory_.Copy(tensor.view()).value();
  }
  TensorView Room(int64_t rows, int64_t columns, DType dtype = kBf16) {
    TestTensor tensor(dtype, {rows, columns});
    for (int64_t i = 0; i < tensor.size(); ++i) tensor.Set(i, kNan);
    return memory_.Copy(tensor.view()).value();
  }
  CudaLinear Layer(int64_t outputs, int64_t k, bool has_bias, DType output = kBf16) {
    TestTensor w(kBf16, {outputs, k}), bias(kBf16, {outputs});
    w.Fill(21);
    bias.Fill(22);
    const PackedLinear::Part part = {.weight = w.view(),
                                     .bias = has_bias ? bias.view() : TensorView()};
    return CudaLinear::Create(*lt_, {&part, 1}, {.input = kBf16, .output = output}).value();
  }
  TensorView Run(CudaLinear& layer, const LinearParams& params) {
    const absl::Status status = layer.Run(params, workspace_.data(), nullptr);
    EXPECT_TRUE(status.ok()) << status;
    return params.y;
  }
  // Rows [first, first + count) of a matrix on the device, on the device.
  static TensorView Rows(const TensorView& x, int64_t first, int64_t count) {
    return TensorView(x.As<BFloat16>() + first * x.dim(1), kBf16, {count, x.dim(1)}, Device::kCuda);
  }
  static TensorView Row(const TensorView& x, int64_t row) { return Rows(x, row, 1); }
  static std::vector<uint16_t> Bits(const TensorView& x) {
    std::vector<uint16_t> bits(static_cast<size_t>(x.num_elements()));
    EXPECT_TRUE(DeviceMemory::Fetch(x.data(), bits.data(), bits.size() * 2).ok());
    return bits;
  }

  std::unique_ptr<CublasLt> lt_;
  DeviceBuffer workspace_;
  DeviceMemory memory_;
};

TEST_F(FewRowsTest, WhatStandsAroundAProductHasTheBitsOfItsParts) {
  for (const Case& c : kCases) {
    for (const bool has_bias : {false, true}) {
      SCOPED_TRACE(testing::Message() << c.rows << " x " << c.outputs << " x " << c.k
                                      << (has_bias ? " with bias" : ""));
      TestTensor host_x(kBf16, {c.rows, c.k}), host_norm(kBf16, {c.k});
      TestTensor host_y(kBf16, {c.rows, c.outputs});
      const TensorView x = OnDevice(host_x, 1), norm = OnDevice(host_norm, 2);
      const TensorView normed = Room(c.rows, c.k), room = Room(c.rows, c.k);
      ASSERT_TRUE(RmsNorm({.x = x, .weight = norm, .y = normed, .epsilon = 1e-5f}, nullptr).ok());
      CudaLinear layer = Layer(c.outputs, c.k, has_bias);
      const TensorView product = Run(layer, {.x = normed, .y = Room(c.rows, c.outputs)});
      EXPECT_EQ(Bits(Run(layer, {.x = x,
                                 .norm = norm,
                                 .epsilon = 1e-5f,
                                 .y = Room(c.rows, c.outputs),
                                 .normed = room})),
                Bits(product));

      const TensorView sum = Run(layer, {.x = normed,
                                         .after = After::kAdd,
                                         .y = OnDevice(host_y, 3),
                                         .product = Room(c.rows, c.outputs)});
      std::vector<uint16_t> expected = Bits(product);
      for (size_t i = 0; i < expected.size(); ++i) {
        BFloat16 value;
        value.bits = expected[i];
        expected[i] =
            BFloat16(host_y.Get(static_cast<int64_t>(i)) + static_cast<float>(value)).bits;
      }
      EXPECT_EQ(Bits(sum), expected);

      CudaLinear gated = Layer(2 * c.outputs, c.k, has_bias);
      const TensorView halves = Run(gated, {.x = normed, .y = Room(c.rows, 2 * c.outputs)});
      const TensorView in_parts = Room(c.rows, c.outputs);
      ASSERT_TRUE(SiluMul({.gate_up = halves, .y = in_parts}, nullptr).ok());
      EXPECT_EQ(Bits(Run(gated, {.x = x,
                                 .norm = norm,
                                 .epsilon = 1e-5f,
                                 .after = After::kSiluMul,
                                 .y = Room(c.rows, c.outputs),
                                 .normed = room,
                                 .product = Room(c.rows, 2 * c.outputs)})),
                Bits(in_parts));
    }
  }
}

// In float32, whose last bits show the order of a sum.
TEST_F(FewRowsTest, ARowHasItsBitsWhateverIsBesideIt) {
  constexpr int64_t kK = 2560, kOutputs = 40;
  TestTensor host_x(kBf16, {kFewRows, kK}), host_norm(kBf16, {kK});
  host_x.Fill(1);
  host_x.Set(2 * kK + 700, kNan);
  host_x.Set(5 * kK + 3, std::numeric_limits<float>::infinity());
  const TensorView x = memory_.Copy(host_x.view()).value(), norm = OnDevice(host_norm, 2);
  CudaLinear layer = Layer(kOutputs, kK, true, kF32);
  const auto run = [&](const TensorView& rows) {
    const int64_t count = rows.dim(0);
    const TensorView y =
        Run(layer,
            {.x = rows, .norm = norm, .y = Room(count, kOutputs, kF32), .normed = Room(count, kK)});
    std::vector<float> values(static_cast<size_t>(count * kOutputs));
    EXPECT_TRUE(DeviceMemory::Fetch(y.data(), values.data(), values.size() * 4).ok());
    return values;
  };
  const std::vector<float> all = run(x);
  for (int64_t row = 0; row < kFewRows; ++row) {
    const std::vector<float> alone = run(Row(x, row));
    for (size_t i = 0; i < alone.size(); ++i) {
      const float beside = all[static_cast<size_t>(row * kOutputs) + i];
      if (row == 2 || row == 5) {
        EXPECT_TRUE(std::isnan(alone[i]) && std::isnan(beside)) << row;
      } else {
        EXPECT_EQ(alone[i], beside) << row;
      }
    }
  }
}

TEST_F(FewRowsTest, CuBlasLtGivesTheSameBits) {
  constexpr int64_t kK = 512, kOutputs = 48, kRows = 6;
  TestTensor host_x(kBf16, {kRows, kK}), host_norm(kBf16, {kK}), host_y(kBf16, {kRows, kOutputs});
  const TensorView x = OnDevice(host_x, 1), norm = OnDevice(host_norm, 2);
  for (const bool has_bias : {false, true}) {
    for (const After after : {After::kStore, After::kAdd, After::kSiluMul}) {
      const int64_t outputs = after == After::kSiluMul ? 2 * kOutputs : kOutputs;
      CudaLinear layer = Layer(outputs, kK, has_bias);
      const LinearParams params = {.x = x,
                                   .norm = norm,
                                   .epsilon = 1e-5f,
                                   .after = after,
                                   .y = OnDevice(host_y, 3),
                                   .normed = Room(kRows, kK),
                                   .product = Room(kRows, outputs)};
      LinearParams again = params;
      again.y = OnDevice(host_y, 3);
      const absl::Status status = layer.RunManyRows(again, workspace_.data(), nullptr);
      ASSERT_TRUE(status.ok()) << status;
      EXPECT_EQ(Bits(Run(layer, params)), Bits(again.y));
    }
  }
}

// As the plain formula, and nothing is written beside y. Rows of x hold, besides usual values:
// zeros, a NaN, an infinity in either sign, values next to the largest, and subnormal ones.
TEST_F(FewRowsTest, HostileRowsAgreeWithAPlainSum) {
  constexpr int64_t kBeside = 64;
  for (const int64_t k : {8, 16, 248, 256, 264, 1032, 4096, 14336}) {
    for (const int64_t outputs : {1, 7, 8, 9, 1057}) {
      if (outputs > 9 && k > 1032) continue;
      for (const int64_t rows : {1, 3, 8}) {
        if (!FewRowsFit(rows, k)) continue;
        SCOPED_TRACE(testing::Message() << rows << " x " << outputs << " x " << k);
        TestTensor x(kBf16, {rows, k}), w(kBf16, {outputs, k}), all(kF32, {rows, outputs});
        x.Fill(1);
        w.Fill(21);  // as Layer's
        for (int64_t i = 0; i < k; ++i) {
          if (rows > 1) x.Set(k + i, i % 2 == 0 ? 0.0f : -0.0f);
        }
        if (rows > 2) x.Set(2 * k + k - 1, kNan);
        if (rows > 7) {
          x.Set(3 * k, std::numeric_limits<float>::infinity());
          x.Set(4 * k + k / 2, -std::numeric_limits<float>::infinity());
          x.Set(5 * k + k - 2, 3e37f);
          x.Set(6 * k + 1, 1e-39f);
        }
        TestTensor room(kF32, {rows * outputs + 2 * kBeside});
        for (int64_t i = 0; i < room.size(); ++i) room.Set(i, 12345.0f);
        const TensorView around = memory_.Copy(room.view()).value();
        const TensorView y(around.As<float>() + kBeside, kF32, {rows, outputs}, Device::kCuda);
        CudaLinear layer = Layer(outputs, k, false, kF32);
        Run(layer, {.x = memory_.Copy(x.view()).value(), .y = y});
        ASSERT_TRUE(DeviceMemory::Fetch(around, room.view()).ok());
        std::vector<double> found, expected;
        double largest = 0;
        for (int64_t row = 0; row < rows; ++row) {
          for (int64_t n = 0; n < outputs; ++n) {
            double sum = 0;
            for (int64_t i = 0; i < k; ++i) {
              const double product = double{x.Get(row * k + i)} * double{w.Get(n * k + i)};
              if (row != 5 && std::isfinite(product))
                largest = std::max(largest, std::abs(product));
              sum += product;
            }
            expected.push_back(static_cast<float>(sum));  // may round to infinity
            found.push_back(room.Get(kBeside + row * outputs + n));
          }
        }
        EXPECT_TRUE(AllClose(
            found, expected,
            {.absolute = largest * std::sqrt(static_cast<double>(k)) * 1e-5, .relative = 1e-4},
            all.shape()));
        for (int64_t i = 0; i < kBeside; ++i) {
          EXPECT_EQ(room.Get(i), 12345.0f);
          EXPECT_EQ(room.Get(kBeside + rows * outputs + i), 12345.0f);
        }
      }
    }
  }
}

// Whatever multiplies: our kernel for a few rows, cuBLASLt's for more.
class RowBitsTest : public FewRowsTest {
 protected:
  static constexpr int64_t kRows = 300;

  struct Shape {
    int64_t outputs, k;
    DType output;
    bool has_bias;
    After after;
  };

  static std::vector<std::byte> BytesOf(const TensorView& y) {
    std::vector<std::byte> bytes(static_cast<size_t>(y.size_bytes()));
    EXPECT_TRUE(DeviceMemory::Fetch(y.data(), bytes.data(), bytes.size()).ok());
    return bytes;
  }
};

TEST_F(RowBitsTest, ProductsOfARowHaveTheSameBitsForOneTo300Rows) {
  const Shape shapes[] = {
      {72, 512, kBf16, false, After::kStore},   {16, 264, kF32, true, After::kStore},
      {1536, 1024, kBf16, true, After::kStore}, {1024, 4096, kF32, false, After::kStore},
      {512, 4096, kBf16, false, After::kAdd},   {1024, 4096, kBf16, false, After::kSiluMul},
      {256, 14336, kBf16, false, After::kAdd},  {4096, 2560, kF32, false, After::kStore}};
  for (const Shape& shape : shapes) {
    SCOPED_TRACE(testing::Message()
                 << shape.outputs << " outputs of " << shape.k << ", " << DTypeName(shape.output)
                 << (shape.has_bias ? ", with bias" : "") << ", "
                 << (shape.after == After::kAdd       ? "added"
                     : shape.after == After::kSiluMul ? "gated"
                                                      : "stored"));
    CudaLinear layer = Layer(shape.outputs, shape.k, shape.has_bias, shape.output);
    ASSERT_NE(layer.algorithms(), nullptr);
    EXPECT_TRUE(layer.keeps_bits())
        << "no algorithm of cuBLASLt has the bits of the kernel for a few rows";
    std::cout << "place of the algorithm by class of rows:";
    for (const int place : layer.algorithms()->places) std::cout << " " << place;
    std::cout << std::endl;
    const int64_t width = shape.after == After::kSiluMul ? shape.outputs / 2 : shape.outputs;
    const auto row_bytes = static_cast<size_t>(width) * DTypeSize(shape.output);
    TestTensor host_x(kBf16, {kRows, shape.k}), host_norm(kBf16, {shape.k});
    TestTensor host_y(shape.output, {kRows, width});
    host_y.Fill(3);
    const TensorView x = OnDevice(host_x, 1), norm = OnDevice(host_norm, 2);
    const TensorView before = memory_.Copy(host_y.view()).value();
    const TensorView y = memory_.Copy(host_y.view()).value();
    const TensorView normed = Room(kRows, shape.k);
    const TensorView product = Room(kRows, shape.outputs, shape.output);
    const auto view = [](const TensorView& of, int64_t first, int64_t count) {
      auto* const data =
          of.As<std::byte>() + static_cast<size_t>(first * of.dim(1)) * DTypeSize(of.dtype());
      return TensorView(data, of.dtype(), {count, of.dim(1)}, Device::kCuda);
    };
    // Rows [first, first + count) of x, to as many rows of y from its begin on.
    const auto run = [&](int64_t first, int64_t count) {
      const TensorView to = view(y, 0, count), from = view(before, first, count);
      EXPECT_EQ(cudaMemcpy(to.data(), from.data(), static_cast<size_t>(to.size_bytes()),
                           cudaMemcpyDeviceToDevice),
                cudaSuccess);
      Run(layer, {.x = view(x, first, count),
                  .norm = norm,
                  .epsilon = 1e-5f,
                  .after = shape.after,
                  .y = to,
                  .normed = view(normed, 0, count),
                  .product = view(product, 0, count)});
      return BytesOf(to);
    };
    std::vector<std::byte> alone;
    for (int64_t row = 0; row < kRows; ++row) {
      const std::vector<std::byte> bytes = run(row, 1);
      alone.insert(alone.end(), bytes.begin(), bytes.end());
    }
    int64_t failures = 0;
    for (int64_t count = 1; count <= kRows && failures < 5; ++count) {
      for (const int64_t first : {int64_t{0}, kRows - count}) {
        // y is aligned as rows from the first on are: no matter, as it begins at its own first.
        const std::vector<std::byte> found = run(first, count);
        for (int64_t row = 0; row < count; ++row) {
          if (std::memcmp(found.data() + static_cast<size_t>(row) * row_bytes,
                          alone.data() + static_cast<size_t>(first + row) * row_bytes,
                          row_bytes) == 0) {
            continue;
          }
          ADD_FAILURE() << "row " << first + row << " of rows " << first << " to "
                        << first + count - 1 << " has other bits than alone";
          ++failures;
          break;
        }
      }
    }
  }
}

TEST_F(FewRowsTest, WrongShapesAreRefused) {
  CudaLinear layer = Layer(16, 32, false), wide = Layer(16, 32, false, kF32);
  const TensorView x = Room(2, 32), y = Room(2, 16), half = Room(2, 8);
  const auto code = [&](CudaLinear& linear, const LinearParams& params) {
    return linear.Run(params, workspace_.data(), nullptr).code();
  };
  const TensorView norm(x.data(), kBf16, {32}, Device::kCuda);
  EXPECT_EQ(code(layer, {.x = x, .norm = norm, .y = y}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(layer, {.x = x, .after = After::kSiluMul, .y = half}),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(layer, {.x = x, .after = After::kSiluMul, .y = y, .product = y}),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(wide, {.x = x, .after = After::kAdd, .y = Room(2, 16, kF32)}),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace kvasir::kernels
