#include "kernels/gemm/gemm_engine.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <gtest/gtest.h>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/base/buffer.h"
#include "kernels/base/cpu_isa.h"
#include "kernels/gemm/gemm.h"
#include "kernels/gemm/gemm_panel.h"
#include "kernels/gemm/gemm_panel_pack.h"
#include "tests/kernels/dense/gemm_cases.h"
#include "tests/support/compare.h"
#include "tests/support/test_tensor.h"
#include "tests/support/thread_executor.h"

namespace kvasir::kernels {
namespace {

using tests::AllClose;
using tests::TestTensor;
using tests::ThreadExecutor;

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

// x [m, k] as it is multiplied by int8: whole multiples of a power of two for each 32 of k, at most
// 2^15 - 1 of them.
void RoundToInt16(TestTensor& x) {
  const int64_t m = x.shape()[0], k = x.shape()[1];
  for (int64_t row = 0; row < m; ++row) {
    for (int64_t begin = 0; begin < k; begin += kScaleGroup) {
      const int64_t end = std::min(k, begin + kScaleGroup);
      float max = 0;
      for (int64_t i = begin; i < end; ++i) max = std::max(max, std::abs(x.Get(row * k + i)));
      const float scale = std::ldexp(1.0f, std::max(std::ilogb(max) - 14, -126));
      for (int64_t i = begin; i < end; ++i) {
        const float multiple = std::nearbyint(x.Get(row * k + i) / scale);
        x.Set(row * k + i, scale * std::min(multiple, 32767.0f));
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
        TestTensor kept(kF32, {c.n, c.k}), taken(kF32, {c.m, c.k});
        for (int64_t i = 0; i < w.size(); ++i) kept.Set(i, w.Get(i));
        for (int64_t i = 0; i < x.size(); ++i) taken.Set(i, x.Get(i));
        if (kind.options.weights == WeightForm::kInt8) {
          RoundToInt8(kept);
          RoundToInt16(taken);
        }
        EXPECT_TRUE(AllClose(y.Values(), Reference(taken, kept, &bias),
                             {.absolute = 1e-6 * RoundingScale(taken, kept),
                              .relative = kind.options.output == kBf16 ? 1.0 / 256 : 1e-6},
                             y.shape()))
            << (*engine)->name();
      }
    }
  }
}

// Values at which code paths part: NaN and infinities in some rows, whole groups of zeros,
// denormals, a column of large weights, a largest x just below a power of two.
void MakeHostile(TestTensor& x, TestTensor& w) {
  const int64_t m = x.shape()[0], n = w.shape()[0], k = x.shape()[1];
  x.Fill(1);
  w.Fill(2);
  for (int64_t i = 0; i < std::min(k, 2 * kScaleGroup); ++i) w.Set((n - 1) * k + i, 0);
  for (int64_t i = 0; i < k; ++i) w.Set(i, 1e-40f * static_cast<float>(i % 7));
  for (int64_t i = 0; i < k; ++i) w.Set(n / 2 * k + i, w.Get(n / 2 * k + i) * 1e30f);
  for (int64_t i = 0; i < k; ++i) x.Set(m / 2 * k + i, 1e-39f);
  x.Set(m / 5 * k + k / 3, 15.999999f);  // rounds to 2^15 of its scale, which int16 has not
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

}  // namespace
}  // namespace kvasir::kernels
