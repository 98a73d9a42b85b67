// Products of a few rows and of a batch of rows (gemm_few_rows.h, gemm_batch_rows.h) against their
// parts, cuBLASLt and a plain sum, and the bits of a row whatever is beside it.
#include <cmath>
#include <cstring>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <iostream>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "kernels/dense/dense_cuda.h"
#include "kernels/gemm/gemm_cuda.h"
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

// A layer of bfloat16, run as a whole and in parts.
class LinearRowsTest : public testing::Test {
 protected:
  using After = LinearParams::After;
  struct Case {
    int64_t rows, outputs, k;
  };
  // Tiles and steps that are not full, fewer steps than warps, and more rows than one row's room;
  // then batches of all sizes of clusters and with several tiles for a CTA, and more rows than
  // that.
  static constexpr Case kCases[] = {{1, 8, 8},    {1, 24, 256},   {2, 13, 264},   {3, 40, 1096},
                                    {8, 72, 512}, {5, 1100, 136}, {2, 12, 8192},  {3, 9, 9216},
                                    {16, 13, 8},  {20, 72, 512},  {64, 40, 4096}, {17, 36001, 72},
                                    {65, 72, 512}};

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
    auto* const data =
        x.As<std::byte>() + static_cast<size_t>(first * x.dim(1)) * DTypeSize(x.dtype());
    return TensorView(data, x.dtype(), {count, x.dim(1)}, Device::kCuda);
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

TEST_F(LinearRowsTest, WhatStandsAroundAProductHasTheBitsOfItsParts) {
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

      TestTensor host_next(kBf16, {c.outputs});
      const TensorView next = OnDevice(host_next, 4), next_normed = Room(c.rows, c.outputs);
      const TensorView apart = Room(c.rows, c.outputs);
      EXPECT_EQ(Bits(Run(layer, {.x = normed,
                                 .epsilon = 1e-5f,
                                 .after = After::kAdd,
                                 .y = OnDevice(host_y, 3),
                                 .next_norm = next,
                                 .next_normed = next_normed,
                                 .product = Room(c.rows, c.outputs)})),
                expected);
      ASSERT_TRUE(RmsNorm({.x = sum, .weight = next, .y = apart, .epsilon = 1e-5f}, nullptr).ok());
      EXPECT_EQ(Bits(next_normed), Bits(apart));
      EXPECT_EQ(layer.normalizes_sums(c.rows), c.rows > 1);

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
TEST_F(LinearRowsTest, ARowHasItsBitsWhateverIsBesideIt) {
  constexpr int64_t kAll = 8, kK = 2560, kOutputs = 40;
  TestTensor host_x(kBf16, {kAll, kK}), host_norm(kBf16, {kK});
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
  for (int64_t row = 0; row < kAll; ++row) {
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

TEST_F(LinearRowsTest, OtherKernelsGiveTheSameBits) {
  using Kernel = LinearPlan::Kernel;
  constexpr int64_t kK = 512, kOutputs = 48;
  for (const int64_t rows : {1, 6, 64}) {
    TestTensor host_x(kBf16, {rows, kK}), host_norm(kBf16, {kK}), host_y(kBf16, {rows, kOutputs});
    const TensorView x = OnDevice(host_x, 1), norm = OnDevice(host_norm, 2);
    for (const bool has_bias : {false, true}) {
      for (const After after : {After::kStore, After::kAdd, After::kSiluMul}) {
        const int64_t outputs = after == After::kSiluMul ? 2 * kOutputs : kOutputs;
        CudaLinear layer = Layer(outputs, kK, has_bias);
        LinearParams params = {.x = x,
                               .norm = norm,
                               .epsilon = 1e-5f,
                               .after = after,
                               .y = OnDevice(host_y, 3),
                               .normed = Room(rows, kK),
                               .product = Room(rows, outputs)};
        const std::vector<uint16_t> expected = Bits(Run(layer, params));
        for (const Kernel kernel : {Kernel::kNormThenFewRows, Kernel::kBatch, Kernel::kCublasLt}) {
          if (kernel == Kernel::kNormThenFewRows && !FewRowsFit(rows, kK)) continue;
          params.y = OnDevice(host_y, 3);
          const absl::Status status = layer.RunBy(kernel, params, workspace_.data(), nullptr);
          ASSERT_TRUE(status.ok()) << status;
          EXPECT_EQ(Bits(params.y), expected);
        }
      }
    }
  }
}

// As the plain formula, and nothing is written beside y. Rows of x hold, besides usual values:
// zeros, a NaN, an infinity in either sign, values next to the largest, and subnormal ones.
TEST_F(LinearRowsTest, HostileRowsAgreeWithAPlainSum) {
  constexpr int64_t kBeside = 64;
  for (const int64_t k : {8, 16, 248, 256, 264, 1032, 4096, 14336}) {
    for (const int64_t outputs : {1, 7, 8, 9, 1057}) {
      if (outputs > 9 && k > 1032) continue;
      for (const int64_t rows : {1, 3, 8, 9, 17, 40, 64}) {
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

// Each number that bfloat16 has as a gate, and multiples of it: the kernel for a batch divides in
// its own way where gates are usual.
TEST_F(LinearRowsTest, EveryGateOfABatchHasTheBitsOfSiluMul) {
  constexpr int64_t kGates = 65536, kK = 8, kRows = 12;
  TestTensor w(kBf16, {2 * kGates, kK}), x(kBf16, {kRows, kK});
  for (int64_t gate = 0; gate < kGates; ++gate) {
    BFloat16 value;
    value.bits = static_cast<uint16_t>(gate);
    w.Set(gate * kK, static_cast<float>(value));
    w.Set((kGates + gate) * kK, 1.5f);
  }
  for (int64_t row = 0; row < kRows; ++row) x.Set(row * kK, 1.0f + 0.25f * static_cast<float>(row));
  const PackedLinear::Part part = {.weight = w.view()};
  CudaLinear layer =
      CudaLinear::Create(*lt_, {&part, 1}, {.input = kBf16, .output = kBf16}).value();
  const auto run = [&](LinearPlan::Kernel kernel) {
    const LinearParams params = {.x = memory_.Copy(x.view()).value(),
                                 .after = After::kSiluMul,
                                 .y = Room(kRows, kGates),
                                 .product = Room(kRows, 2 * kGates)};
    const absl::Status status = layer.RunBy(kernel, params, workspace_.data(), nullptr);
    EXPECT_TRUE(status.ok()) << status;
    return Bits(params.y);
  };
  EXPECT_EQ(run(LinearPlan::Kernel::kBatch), run(LinearPlan::Kernel::kCublasLt));
}

TEST_F(LinearRowsTest, WrongShapesAreRefused) {
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
  const TensorView many = Room(65, 32), many_y = Room(65, 16);
  for (const auto kernel : {LinearPlan::Kernel::kFewRows, LinearPlan::Kernel::kBatch}) {
    EXPECT_EQ(layer.RunBy(kernel, {.x = many, .y = many_y}, workspace_.data(), nullptr).code(),
              absl::StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(code(wide, {.x = x, .after = After::kAdd, .y = Room(2, 16, kF32)}),
            absl::StatusCode::kInvalidArgument);
}

// Whatever multiplies: our kernels for a few rows and for a batch, cuBLASLt's for more.
class RowBitsTest : public LinearRowsTest {
 protected:
  static constexpr int64_t kRows = 300;

  struct Shape {
    int64_t outputs, k;
    DType output;
    bool has_bias;
    After after;
  };
  // On the device, kRows rows each. `before`: what y holds before the product.
  struct Tensors {
    TensorView x, norm, before, y, normed, product;
  };

  static std::string NameOf(const Shape& shape) {
    return (testing::Message() << shape.outputs << " outputs of " << shape.k << ", "
                               << DTypeName(shape.output) << (shape.has_bias ? ", with bias" : "")
                               << ", "
                               << (shape.after == After::kAdd       ? "added"
                                   : shape.after == After::kSiluMul ? "gated"
                                                                    : "stored"))
        .GetString();
  }
  Tensors MakeTensors(const Shape& shape) {
    const int64_t width = shape.after == After::kSiluMul ? shape.outputs / 2 : shape.outputs;
    TestTensor host_x(kBf16, {kRows, shape.k}), host_norm(kBf16, {shape.k});
    TestTensor host_y(shape.output, {kRows, width});
    return {.x = OnDevice(host_x, 1),
            .norm = OnDevice(host_norm, 2),
            .before = OnDevice(host_y, 3),
            .y = OnDevice(host_y, 3),
            .normed = Room(kRows, shape.k),
            .product = Room(kRows, shape.outputs, shape.output)};
  }
  // Runs the layer over rows [first, first + count) of x, to as many rows of y from its begin on.
  // Returns these rows' bytes.
  std::vector<std::byte> RunRows(CudaLinear& layer, After after, const Tensors& tensors,
                                 int64_t first, int64_t count) {
    const TensorView y = Rows(tensors.y, 0, count), before = Rows(tensors.before, first, count);
    EXPECT_EQ(cudaMemcpy(y.data(), before.data(), static_cast<size_t>(y.size_bytes()),
                         cudaMemcpyDeviceToDevice),
              cudaSuccess);
    Run(layer, {.x = Rows(tensors.x, first, count),
                .norm = tensors.norm,
                .epsilon = 1e-5f,
                .after = after,
                .y = y,
                .normed = Rows(tensors.normed, 0, count),
                .product = Rows(tensors.product, 0, count)});
    std::vector<std::byte> bytes(static_cast<size_t>(y.size_bytes()));
    EXPECT_TRUE(DeviceMemory::Fetch(y.data(), bytes.data(), bytes.size()).ok());
    return bytes;
  }
  // Compares `found`, rows [first, first + count), with those that were computed alone. Returns
  // whether all are the same.
  static bool ExpectSameRows(const std::vector<std::byte>& found,
                             const std::vector<std::byte>& alone, int64_t first, int64_t count) {
    const size_t row_bytes = found.size() / static_cast<size_t>(count);
    for (int64_t row = 0; row < count; ++row) {
      if (std::memcmp(found.data() + static_cast<size_t>(row) * row_bytes,
                      alone.data() + static_cast<size_t>(first + row) * row_bytes,
                      row_bytes) == 0) {
        continue;
      }
      ADD_FAILURE() << "row " << first + row << " of rows " << first << " to " << first + count - 1
                    << " has other bits than alone";
      return false;
    }
    return true;
  }
};

TEST_F(RowBitsTest, ProductsOfARowHaveTheSameBitsForOneTo300Rows) {
  const Shape shapes[] = {
      {72, 512, kBf16, false, After::kStore},   {16, 264, kF32, true, After::kStore},
      {1536, 1024, kBf16, true, After::kStore}, {1024, 4096, kF32, false, After::kStore},
      {512, 4096, kBf16, false, After::kAdd},   {1024, 4096, kBf16, false, After::kSiluMul},
      {256, 14336, kBf16, false, After::kAdd},  {4096, 2560, kF32, false, After::kStore}};
  for (const Shape& shape : shapes) {
    SCOPED_TRACE(NameOf(shape));
    CudaLinear layer = Layer(shape.outputs, shape.k, shape.has_bias, shape.output);
    ASSERT_NE(layer.algorithms(), nullptr);
    EXPECT_TRUE(layer.keeps_bits())
        << "no algorithm of cuBLASLt has the bits of the kernel for a few rows";
    std::cout << "place of the algorithm by class of rows:";
    for (const int place : layer.algorithms()->places) std::cout << " " << place;
    std::cout << std::endl;
    const Tensors tensors = MakeTensors(shape);
    std::vector<std::byte> alone;
    for (int64_t row = 0; row < kRows; ++row) {
      const std::vector<std::byte> bytes = RunRows(layer, shape.after, tensors, row, 1);
      alone.insert(alone.end(), bytes.begin(), bytes.end());
    }
    int64_t failures = 0;
    for (int64_t count = 1; count <= kRows && failures < 5; ++count) {
      for (const int64_t first : {int64_t{0}, kRows - count}) {
        // y is aligned as rows from the first on are: no matter, as it begins at its own first.
        const std::vector<std::byte> found = RunRows(layer, shape.after, tensors, first, count);
        if (!ExpectSameRows(found, alone, first, count)) ++failures;
      }
    }
  }
}

}  // namespace
}  // namespace kvasir::kernels
