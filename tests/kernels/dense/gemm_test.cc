#include "kernels/gemm/gemm.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <gtest/gtest.h>
#include <string>
#include <utility>
#include <vector>

#include "kernels/base/buffer.h"
#include "kernels/base/cpu_isa.h"
#include "kernels/gemm/gemm_engine.h"
#include "tests/kernels/dense/gemm_cases.h"
#include "tests/support/compare.h"
#include "tests/support/test_tensor.h"
#include "tests/support/thread_executor.h"

namespace kvasir::kernels {
namespace {

using tests::AllClose;
using tests::TestTensor;
using tests::ThreadExecutor;

absl::Status RunLinear(PackedLinear& linear, const TensorView& x, const TensorView& y,
                       Executor& executor) {
  auto scratch = HostBuffer::Allocate(linear.ScratchBytes(executor.num_threads()));
  if (!scratch.ok()) return scratch.status();
  return linear.Run(x, y, {scratch->data(), static_cast<size_t>(scratch->size_bytes())}, executor);
}

PackedLinear Pack(const std::vector<PackedLinear::Part>& parts,
                  const PackedLinear::Options& options) {
  auto linear = PackedLinear::Create(parts, options);
  KVASIR_CHECK(linear.ok());
  return *std::move(linear);
}

void CheckAgainstReference(const PackedLinear::Options& options, bool with_bias, double relative) {
  ThreadExecutor executor(2);
  for (const Case& c : kCases) {
    SCOPED_TRACE(testing::Message() << "m " << c.m << " k " << c.k << " n " << c.n);
    TestTensor x(options.input, {c.m, c.k}), w(options.input, {c.n, c.k});
    TestTensor bias(options.input, {c.n}), y(options.output, {c.m, c.n});
    x.Fill(1);
    w.Fill(2);
    bias.Fill(3);
    PackedLinear linear =
        Pack({{.weight = w.view(), .bias = with_bias ? bias.view() : TensorView()}}, options);
    ASSERT_TRUE(RunLinear(linear, x.view(), y.view(), executor).ok());
    EXPECT_TRUE(AllClose(y.Values(), Reference(x, w, with_bias ? &bias : nullptr),
                         {.absolute = 1e-6 * RoundingScale(x, w), .relative = relative}, y.shape()))
        << linear.engine_name();
  }
}

TEST(PackedLinear, Float32AgreesWithDoubleReference) {
  CheckAgainstReference({.input = kF32, .output = kF32}, /*with_bias=*/false, 1e-6);
  CheckAgainstReference({.input = kF32, .output = kF32}, /*with_bias=*/true, 1e-6);
}

TEST(PackedLinear, BFloat16AgreesWithDoubleReference) {
  for (bool with_bias : {false, true}) {
    CheckAgainstReference({.input = kBf16, .output = kF32}, with_bias, 1e-6);
    CheckAgainstReference({.input = kBf16, .output = kBf16}, with_bias, 1.0 / 256);
  }
}

// Shapes of the reference model, and slices of an 8B model's.
struct Shape {
  int64_t k, n;
};
const Shape kModelShapes[] = {{256, 512},  {256, 1536}, {768, 256},  {256, 2048},
                              {1024, 700}, {4096, 640}, {14336, 130}};

// Every count up to 600 for the small shapes; else all up to 70 and around each tile edge.
std::vector<int64_t> RowCounts(const Shape& shape) {
  std::vector<int64_t> counts;
  const int64_t all_up_to = shape.k * shape.n <= 256 * 768 ? 600 : 70;
  for (int64_t m = 1; m <= all_up_to; ++m) counts.push_back(m);
  if (all_up_to == 600 || shape.k > 1024) return counts;
  for (int64_t m : {127, 128, 129, 255, 256, 257, 400, 511, 512, 513, 600}) counts.push_back(m);
  return counts;
}

// The largest difference between rows computed in a batch (at another index, with other neighbours
// and maybe on other threads) and the same rows computed alone, relative to the largest |y|.
double DependenceOnBatch(DType dtype, const Shape& shape, std::string& engine) {
  const std::vector<int64_t> row_counts = RowCounts(shape);
  const int64_t max_rows = row_counts.back();
  TestTensor w(dtype, {shape.n, shape.k}), x(dtype, {2 * max_rows, shape.k});
  TestTensor alone(kF32, {2 * max_rows, shape.n});
  w.Fill(1);
  x.Fill(2);
  PackedLinear linear = Pack({{.weight = w.view()}}, {.input = dtype, .output = kF32});
  engine = linear.engine_name();
  SerialExecutor serial;
  ThreadExecutor threads(3);
  const int64_t row_bytes = shape.k * static_cast<int64_t>(DTypeSize(dtype));
  const auto rows_of_x = [&](int64_t first, int64_t m) {
    return TensorView(x.view().As<std::byte>() + first * row_bytes, dtype, {m, shape.k});
  };
  for (int64_t r = 0; r < 2 * max_rows; ++r) {
    const TensorView y(alone.view().As<float>() + r * shape.n, kF32, {1, shape.n});
    EXPECT_TRUE(RunLinear(linear, rows_of_x(r, 1), y, serial).ok());
  }
  double worst = 0, largest = 0;
  for (int64_t m : row_counts) {
    const int64_t first = 7 * m % max_rows;
    Executor& executor = m % 2 == 0 ? static_cast<Executor&>(serial) : threads;
    TestTensor y(kF32, {m, shape.n});
    EXPECT_TRUE(RunLinear(linear, rows_of_x(first, m), y.view(), executor).ok());
    const float* got = y.view().As<float>();
    const float* expected = alone.view().As<float>() + first * shape.n;
    for (int64_t i = 0; i < m * shape.n; ++i) {
      worst = std::max(worst, std::abs(static_cast<double>(got[i]) - expected[i]));
      largest = std::max(largest, std::abs(static_cast<double>(expected[i])));
    }
  }
  return worst / largest;
}

TEST(PackedLinear, Float32RowIsBitwiseTheSameInEveryBatch) {
  for (const Shape& shape : kModelShapes) {
    std::string engine;
    EXPECT_EQ(DependenceOnBatch(kF32, shape, engine), 0.0)
        << engine << " k " << shape.k << " n " << shape.n;
  }
}

TEST(PackedLinear, BFloat16RowHardlyDependsOnTheBatch) {
  for (const Shape& shape : kModelShapes) {
    std::string engine;
    const double worst = DependenceOnBatch(kBf16, shape, engine);
    EXPECT_LT(worst, 1e-5) << engine << " k " << shape.k << " n " << shape.n;
    std::printf("%s, k %ld, n %ld: largest difference %.3g of the largest value\n", engine.c_str(),
                shape.k, shape.n, worst);
  }
}

TEST(PackedLinear, PartsAreStackedAndWeightsConverted) {
  TestTensor gate(kBf16, {40, 24}), up(kF32, {30, 24}), gate_bias(kF32, {40});
  gate.Fill(1);
  up.Fill(2);
  gate_bias.Fill(3);
  PackedLinear linear =
      Pack({{.weight = gate.view(), .bias = gate_bias.view()}, {.weight = up.view()}},
           {.input = kF32, .output = kF32});
  EXPECT_EQ(linear.out_features(), 70);
  TestTensor x(kF32, {3, 24}), y(kF32, {3, 70});
  x.Fill(4);
  SerialExecutor executor;
  ASSERT_TRUE(RunLinear(linear, x.view(), y.view(), executor).ok());
  const std::vector<double> of_gate = Reference(x, gate, &gate_bias);
  const std::vector<double> of_up = Reference(x, up, nullptr);
  std::vector<double> expected;
  for (int64_t row = 0; row < 3; ++row) {
    expected.insert(expected.end(), of_gate.begin() + row * 40, of_gate.begin() + row * 40 + 40);
    expected.insert(expected.end(), of_up.begin() + row * 30, of_up.begin() + row * 30 + 30);
  }
  EXPECT_TRUE(AllClose(y.Values(), expected, {.absolute = 1e-3}, y.shape()));
}

TEST(PackedLinear, NonFiniteInputStaysInItsRow) {
  for (DType dtype : {kF32, kBf16}) {
    TestTensor w(dtype, {96, 48}), x(dtype, {20, 48}), y(dtype, {20, 96});
    w.Fill(1);
    for (int64_t i = 0; i < w.size(); ++i) w.Set(i, std::abs(w.Get(i)) + 0.1f);
    x.Fill(2);
    x.Set(5 * 48 + 7, kNan);
    x.Set(6 * 48 + 47, kInf);
    x.Set(19 * 48, -kInf);
    PackedLinear linear = Pack({{.weight = w.view()}}, {.input = dtype, .output = dtype});
    SerialExecutor executor;
    ASSERT_TRUE(RunLinear(linear, x.view(), y.view(), executor).ok());
    EXPECT_TRUE(AllClose(y.Values(), Reference(x, w, nullptr),
                         {.absolute = 1e-3, .relative = 1.0 / 256}, y.shape()));
  }
}

TEST(PackedLinear, HugeValuesOverflowAsTheFormula) {
  TestTensor w(kF32, {32, 16}), x(kF32, {2, 16}), y(kF32, {2, 32});
  for (int64_t i = 0; i < w.size(); ++i) w.Set(i, 1e30f);
  for (int64_t i = 0; i < x.size(); ++i) x.Set(i, i < 16 ? 1e30f : 1e-30f);
  PackedLinear linear = Pack({{.weight = w.view()}}, {.input = kF32, .output = kF32});
  SerialExecutor executor;
  ASSERT_TRUE(RunLinear(linear, x.view(), y.view(), executor).ok());
  EXPECT_EQ(y.Get(0), kInf);
  EXPECT_NEAR(y.Get(32), 16.0f, 1e-4f);
}

TEST(PackedLinear, NoRowsAreNoWork) {
  TestTensor w(kF32, {8, 8});
  PackedLinear linear = Pack({{.weight = w.view()}}, {.input = kF32, .output = kF32});
  SerialExecutor executor;
  const TensorView empty(nullptr, kF32, {0, 8});
  EXPECT_TRUE(RunLinear(linear, empty, empty, executor).ok());
}

TEST(PackedLinear, BadWeightsAreErrors) {
  TestTensor w(kF32, {8, 16}), other_k(kF32, {8, 15}), bias(kF32, {7}), none(kF32, {0, 16});
  using absl::StatusCode;
  const auto create = [](const std::vector<PackedLinear::Part>& parts, DType input, DType output) {
    return PackedLinear::Create(parts, {.input = input, .output = output}).status().code();
  };
  EXPECT_EQ(create({}, kF32, kF32), StatusCode::kInvalidArgument);
  EXPECT_EQ(create({{w.view(), bias.view()}}, kF32, kF32), StatusCode::kInvalidArgument);
  EXPECT_EQ(create({{w.view(), {}}, {other_k.view(), {}}}, kF32, kF32),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(create({{none.view(), {}}}, kF32, kF32), StatusCode::kInvalidArgument);
  EXPECT_EQ(create({{w.view(), {}}}, DType::kFloat16, kF32), StatusCode::kInvalidArgument);
  EXPECT_EQ(create({{w.view(), {}}}, kF32, kBf16), StatusCode::kInvalidArgument);
  const TensorView on_gpu(w.view().data(), kF32, {8, 16}, Device::kCuda);
  EXPECT_EQ(create({{on_gpu, {}}}, kF32, kF32), StatusCode::kUnimplemented);
}

TEST(PackedLinear, BadArgumentsOfRunAreErrors) {
  TestTensor w(kF32, {8, 16}), x(kF32, {2, 16}), y(kF32, {2, 8}), x_bf16(kBf16, {2, 16});
  using absl::StatusCode;
  PackedLinear linear = Pack({{.weight = w.view()}}, {.input = kF32, .output = kF32});
  SerialExecutor executor;
  const auto run = [&](const TensorView& a, const TensorView& b) {
    return RunLinear(linear, a, b, executor).code();
  };
  EXPECT_EQ(run(x_bf16.view(), y.view()), StatusCode::kInvalidArgument);
  EXPECT_EQ(run(x.view(), x.view()), StatusCode::kInvalidArgument);
  EXPECT_EQ(run(TensorView(x.view().data(), kF32, {2, 16}, Device::kCuda), y.view()),
            StatusCode::kUnimplemented);
  if (linear.ScratchBytes(1) > 0) {
    EXPECT_EQ(linear.Run(x.view(), y.view(), {}, executor).code(), StatusCode::kInvalidArgument);
  }
}

// Restores the instruction set.
class CpuIsaTest : public testing::Test {
 protected:
  ~CpuIsaTest() override { KVASIR_CHECK(LimitCpuIsa(CpuIsaName(before_)).ok()); }

 private:
  const CpuIsa before_ = ChosenCpuIsa();
};

TEST_F(CpuIsaTest, ChoosesTheEngine) {
  TestTensor w(kF32, {64, 64});
  const auto name = [&](const Kind& kind) {
    return Pack({{.weight = w.view()}}, kind.options).engine_name();
  };
  for (const CpuIsa isa : MachineIsas()) {
    ASSERT_TRUE(LimitCpuIsa(CpuIsaName(isa)).ok());
    const bool pairs = isa == CpuIsa::kAvx512Bf16;
    const std::string vectors(pairs ? "avx512" : CpuIsaName(isa));
    EXPECT_EQ(name(kKinds[0]), "panel:" + vectors + ":f32");
    EXPECT_EQ(name(kKinds[3]), "panel:" + vectors + ":int8");
    if (pairs && OneDnnHasMatrixUnits()) continue;
    EXPECT_EQ(name(kKinds[1]), pairs ? "panel:avx512_bf16:bf16" : "panel:" + vectors + ":bf16");
  }
}

TEST_F(CpuIsaTest, EveryLimitAgreesWithTheReference) {
  for (const CpuIsa isa : MachineIsas()) {
    ASSERT_TRUE(LimitCpuIsa(CpuIsaName(isa)).ok());
    CheckAgainstReference({.input = kF32, .output = kF32}, /*with_bias=*/true, 1e-6);
    CheckAgainstReference({.input = kBf16, .output = kBf16}, /*with_bias=*/true, 1.0 / 256);
  }
}

TEST_F(CpuIsaTest, Float32RowIsBitwiseTheSameInEveryBatchUnderEveryLimit) {
  for (const CpuIsa isa : MachineIsas()) {
    if (isa == CpuIsa::kPortable) continue;
    ASSERT_TRUE(LimitCpuIsa(CpuIsaName(isa)).ok());
    for (const Shape& shape : {Shape{256, 512}, Shape{1024, 700}}) {
      std::string engine;
      EXPECT_EQ(DependenceOnBatch(kF32, shape, engine), 0.0) << engine << " k " << shape.k;
    }
  }
}

}  // namespace
}  // namespace kvasir::kernels
