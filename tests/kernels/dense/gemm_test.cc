#include "kernels/gemm/gemm.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <gtest/gtest.h>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernels/base/buffer.h"
#include "kernels/base/cpu_isa.h"
#include "kernels/gemm/gemm_engine.h"
#include "kernels/gemm/gemm_panel.h"
#include "kernels/gemm/gemm_panel_pack.h"
#include "tests/support/compare.h"
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

std::vector<double> Reference(TestTensor& x, TestTensor& w, TestTensor* bias) {
  const std::vector<double> xs = x.Values(), ws = w.Values();
  const int64_t m = x.shape()[0], k = x.shape()[1], n = w.shape()[0];
  std::vector<double> y;
  for (int64_t row = 0; row < m; ++row) {
    for (int64_t column = 0; column < n; ++column) {
      double sum = bias == nullptr ? 0.0 : bias->Get(column);
      for (int64_t i = 0; i < k; ++i) {
        sum += xs[static_cast<size_t>(row * k + i)] * ws[static_cast<size_t>(column * k + i)];
      }
      y.push_back(sum);
    }
  }
  return y;
}

// What one rounding of the largest product does to a sum of k such products, about.
double RoundingScale(TestTensor& x, TestTensor& w) {
  double x_max = 0, w_max = 0;
  for (double v : x.Values()) x_max = std::max(x_max, std::abs(v));
  for (double v : w.Values()) w_max = std::max(w_max, std::abs(v));
  return x_max * w_max * std::sqrt(static_cast<double>(x.shape()[1]));
}

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

struct Case {
  int64_t m, k, n;
};

const Case kCases[] = {{1, 1, 1},     {1, 7, 5},      {3, 16, 64},
                       {17, 33, 65},  {64, 256, 512}, {65, 100, 129},
                       {130, 768, 3}, {5, 1100, 200}, {2, 2048, 1030}};

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

// Every instruction set that the machine has.
std::vector<CpuIsa> MachineIsas() {
  std::vector<CpuIsa> isas;
  for (const CpuIsa isa :
       {CpuIsa::kPortable, CpuIsa::kNeon, CpuIsa::kAvx2, CpuIsa::kAvx512, CpuIsa::kAvx512Bf16}) {
    if (CpuHas(isa)) isas.push_back(isa);
  }
  return isas;
}

struct Kind {
  const char* name;
  PackedLinear::Options options;
};

const Kind kKinds[] = {
    {"f32", {.input = kF32, .output = kF32}},
    {"bf16", {.input = kBf16, .output = kBf16}},
    {"bf16 to f32", {.input = kBf16, .output = kF32}},
    {"int8", {.input = kBf16, .output = kF32, .weights = WeightForm::kInt8}},
    {"int8 of f32", {.input = kF32, .output = kF32, .weights = WeightForm::kInt8}},
};

// w [n, k] rounded as int8 rounds it: whole multiples of a scale for each 32 of k.
void RoundToInt8(TestTensor& w) {
  const int64_t n = w.shape()[0], k = w.shape()[1];
  for (int64_t row = 0; row < n; ++row) {
    for (int64_t begin = 0; begin < k; begin += kScaleGroup) {
      const int64_t end = std::min(k, begin + kScaleGroup);
      float max = 0;
      for (int64_t i = begin; i < end; ++i) max = std::max(max, std::abs(w.Get(row * k + i)));
      const float scale = Int8Scale(max);
      for (int64_t i = begin; i < end; ++i) {
        w.Set(row * k + i, scale * QuantizeToInt8(w.Get(row * k + i), scale));
      }
    }
  }
}

absl::StatusOr<std::unique_ptr<GemmEngine>> MakePanels(const std::vector<PackedLinear::Part>& parts,
                                                       const PackedLinear::Options& options,
                                                       CpuIsa isa) {
  const TensorView& w = parts[0].weight;
  HostArena memory(0);
  return CreatePanelGemm(WeightSource(parts, w.dim(0), w.dim(1)), options, isa, memory);
}

// Rows [first, first + rows) of x.
void RunEngine(GemmEngine& engine, TestTensor& x, int64_t first, TestTensor& y,
               Executor& executor) {
  auto scratch = HostBuffer::Allocate(engine.ScratchBytes(executor.num_threads()));
  KVASIR_CHECK(scratch.ok());
  std::memset(scratch->data(), 0xff, static_cast<size_t>(scratch->size_bytes()));  // NaN
  const int64_t row_bytes = x.view().size_bytes() / x.shape()[0];
  ASSERT_TRUE(engine
                  .Run({.x = x.view().As<std::byte>() + first * row_bytes,
                        .y = y.view().As<std::byte>(),
                        .rows = y.shape()[0],
                        .scratch = scratch->data()},
                       executor)
                  .ok());
}

TEST(PanelGemm, EveryFormAgreesWithTheReference) {
  ThreadExecutor executor(2);
  for (const CpuIsa isa : MachineIsas()) {
    for (const Kind& kind : kKinds) {
      for (const Case& c : kCases) {
        SCOPED_TRACE(testing::Message() << CpuIsaName(isa) << ' ' << kind.name << " m " << c.m
                                        << " k " << c.k << " n " << c.n);
        TestTensor x(kind.options.input, {c.m, c.k}), w(kind.options.input, {c.n, c.k});
        TestTensor bias(kF32, {c.n}), y(kind.options.output, {c.m, c.n});
        x.Fill(1);
        w.Fill(2);
        bias.Fill(3);
        auto engine = MakePanels({{.weight = w.view(), .bias = bias.view()}}, kind.options, isa);
        ASSERT_TRUE(engine.ok()) << engine.status();
        RunEngine(**engine, x, 0, y, executor);
        TestTensor kept(kF32, {c.n, c.k});
        for (int64_t i = 0; i < w.size(); ++i) kept.Set(i, w.Get(i));
        if (kind.options.weights == WeightForm::kInt8) RoundToInt8(kept);
        EXPECT_TRUE(AllClose(y.Values(), Reference(x, kept, &bias),
                             {.absolute = 1e-6 * RoundingScale(x, kept),
                              .relative = kind.options.output == kBf16 ? 1.0 / 256 : 1e-6},
                             y.shape()))
            << (*engine)->name();
      }
    }
  }
}

// Values at which code paths part: NaN and infinities in some rows, whole groups of zeros,
// denormals, a column of large weights.
void MakeHostile(TestTensor& x, TestTensor& w) {
  const int64_t m = x.shape()[0], n = w.shape()[0], k = x.shape()[1];
  x.Fill(1);
  w.Fill(2);
  for (int64_t i = 0; i < std::min(k, 2 * kScaleGroup); ++i) w.Set((n - 1) * k + i, 0);
  for (int64_t i = 0; i < k; ++i) w.Set(i, 1e-40f * static_cast<float>(i % 7));
  for (int64_t i = 0; i < k; ++i) w.Set(n / 2 * k + i, w.Get(n / 2 * k + i) * 1e30f);
  for (int64_t i = 0; i < k; ++i) x.Set(m / 2 * k + i, 1e-39f);
  x.Set(m * k - 1, kNan);
  x.Set(m / 3 * k, kInf);
  x.Set(m / 4 * k + k / 2, -kInf);
}

// Bits but for which NaN it is.
bool SameBits(TestTensor& a, TestTensor& b, int64_t row_of_a) {
  const int64_t n = b.shape()[1];
  for (int64_t i = 0; i < b.size(); ++i) {
    const float left = a.Get(row_of_a * n + i), right = b.Get(i);
    if (std::isnan(left) && std::isnan(right)) continue;
    if (std::memcmp(&left, &right, sizeof(left)) != 0) return false;
  }
  return true;
}

const Case kBitCases[] = {{1, 1, 1},     {9, 31, 17},    {20, 33, 96},
                          {40, 224, 65}, {30, 385, 130}, {7, 576, 160},
                          {200, 64, 33}, {15, 1100, 47}, {1100, 40, 16}};

TEST(PanelGemm, EveryFormAndRowCountGivesTheSameBits) {
  SerialExecutor serial;
  ThreadExecutor threads(3);
  for (const Kind& kind : kKinds) {
    for (const Case& c : kBitCases) {
      TestTensor x(kind.options.input, {c.m, c.k}), w(kind.options.input, {c.n, c.k});
      TestTensor bias(kF32, {c.n}), expected(kind.options.output, {c.m, c.n});
      MakeHostile(x, w);
      bias.Fill(3);
      const std::vector<PackedLinear::Part> parts = {{.weight = w.view(), .bias = bias.view()}};
      RunEngine(**MakePanels(parts, kind.options, CpuIsa::kPortable), x, 0, expected, serial);
      for (const CpuIsa isa : MachineIsas()) {
        const auto engine = MakePanels(parts, kind.options, isa);
        // Pairs of bfloat16 have bits of their own, the same for every number of rows.
        if (isa == CpuIsa::kAvx512Bf16) RunEngine(**engine, x, 0, expected, serial);
        for (int64_t rows = 1; rows <= c.m; rows += rows < 30 ? 1 : c.m - rows + (rows == c.m)) {
          const int64_t first = 7 * rows % (c.m - rows + 1);
          Executor& executor = rows % 2 == 0 ? static_cast<Executor&>(serial) : threads;
          TestTensor y(kind.options.output, {rows, c.n});
          RunEngine(**engine, x, first, y, executor);
          ASSERT_TRUE(SameBits(expected, y, first))
              << (*engine)->name() << ' ' << kind.name << ", " << rows << " rows from " << first
              << ", k " << c.k << " n " << c.n;
        }
      }
    }
  }
}

TEST(PanelGemm, ThreadsAndManyItemsDoNotChangeBits) {
  for (const Kind& kind : kKinds) {
    TestTensor x(kind.options.input, {450, 200}), w(kind.options.input, {1000, 200});
    MakeHostile(x, w);
    for (const CpuIsa isa : MachineIsas()) {
      if (isa == CpuIsa::kPortable) continue;  // too slow, and the same items
      const auto engine = MakePanels({{.weight = w.view()}}, kind.options, isa);
      for (const int64_t rows : {5, 450}) {
        SerialExecutor serial;
        TestTensor expected(kind.options.output, {rows, 1000});
        RunEngine(**engine, x, 0, expected, serial);
        for (const int num_threads : {2, 5}) {
          ThreadExecutor threads(num_threads);
          TestTensor y(kind.options.output, {rows, 1000});
          RunEngine(**engine, x, 0, y, threads);
          EXPECT_TRUE(SameBits(expected, y, 0)) << (*engine)->name() << ' ' << num_threads;
        }
      }
    }
  }
}

TEST(PanelGemm, NonFiniteInputStaysInItsRow) {
  SerialExecutor serial;
  for (const CpuIsa isa : MachineIsas()) {
    for (const Kind& kind : kKinds) {
      for (const int64_t rows : {4, 40}) {
        TestTensor x(kind.options.input, {rows, 48}), w(kind.options.input, {70, 48});
        TestTensor y(kF32, {rows, 70});
        PackedLinear::Options options = kind.options;
        options.output = kF32;
        x.Fill(1);
        w.Fill(2);
        x.Set(48 + 5, kNan);
        x.Set(2 * 48 + 47, kInf);
        RunEngine(**MakePanels({{.weight = w.view()}}, options, isa), x, 0, y, serial);
        for (int64_t i = 0; i < y.size(); ++i) {
          EXPECT_EQ(std::isfinite(y.Get(i)), i / 70 != 1 && i / 70 != 2) << kind.name << ' ' << i;
        }
      }
    }
  }
}

TEST(Int8Weights, AreWithinHalfAScale) {
  for (const float size : {1.0f, 1e-3f, 1e30f, 1e-37f, 1e-40f, 1e-45f, 0.0f}) {
    TestTensor w(kF32, {1, kScaleGroup});
    w.Fill(5);
    float max = 0;
    for (int64_t i = 0; i < kScaleGroup; ++i) {
      w.Set(i, w.Get(i) * size);
      max = std::max(max, std::abs(w.Get(i)));
    }
    const float scale = Int8Scale(max);
    EXPECT_GE(scale * 127, max);
    // The next bfloat16 is at most a 128th more, or of denormals one step.
    EXPECT_LE(scale, static_cast<double>(max) / 127 * (1 + 1.0 / 128) + 0x1p-133);
    for (int64_t i = 0; i < kScaleGroup; ++i) {
      const double decoded = static_cast<double>(scale) * QuantizeToInt8(w.Get(i), scale);
      EXPECT_LE(std::abs(decoded - w.Get(i)), 0.5000001 * scale) << size << ' ' << i;
    }
  }
  EXPECT_EQ(Int8Scale(0), 0.0f);
  EXPECT_EQ(QuantizeToInt8(0, 0), 0);
  EXPECT_LT(Int8Scale(std::numeric_limits<float>::max()), kInf);
}

TEST(Int8Weights, ThatAreNotFiniteAreRefused) {
  for (const float bad : {kNan, kInf, -kInf}) {
    TestTensor w(kF32, {20, 40});
    w.Fill(1);
    w.Set(17 * 40 + 39, bad);
    const PackedLinear::Part part = {.weight = w.view()};
    const absl::Status status =
        PackedLinear::Create(std::span(&part, 1), {.weights = WeightForm::kInt8}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("output 17"), std::string::npos) << status;
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

// The engine of machines with AMX, as far as this one has it.
TEST(OneDnnGemm, AgreesWithTheReference) {
  ThreadExecutor executor(2);
  for (const Case& c : kCases) {
    TestTensor x(kBf16, {c.m, c.k}), w(kBf16, {c.n, c.k}), bias(kBf16, {c.n});
    TestTensor y(kBf16, {c.m, c.n});
    x.Fill(1);
    w.Fill(2);
    bias.Fill(3);
    const std::vector<PackedLinear::Part> parts = {{.weight = w.view(), .bias = bias.view()}};
    HostArena memory(0);
    const auto engine =
        CreateOneDnnGemm(WeightSource(parts, c.n, c.k), {.input = kBf16, .output = kBf16}, memory);
    if (absl::IsUnimplemented(engine.status())) GTEST_SKIP() << engine.status();
    ASSERT_TRUE(engine.ok()) << engine.status();
    RunEngine(**engine, x, 0, y, executor);
    EXPECT_TRUE(AllClose(y.Values(), Reference(x, w, &bias),
                         {.absolute = 1e-6 * RoundingScale(x, w), .relative = 1.0 / 256},
                         y.shape()));
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
