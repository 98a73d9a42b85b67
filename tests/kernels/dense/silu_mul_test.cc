#include "kernels/dense/silu_mul.h"

#include <algorithm>
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

// silu is rounded to the dtype before the product, as in Hugging Face.
std::vector<double> Reference(TestTensor& gate_up, DType dtype) {
  const int64_t dim = gate_up.shape()[1] / 2;
  std::vector<double> y;
  for (int64_t row = 0; row < gate_up.shape()[0]; ++row) {
    for (int64_t d = 0; d < dim; ++d) {
      const double gate = gate_up.Get(row * 2 * dim + d);
      const auto silu = static_cast<float>(gate / (1 + std::exp(-gate)));
      const float rounded = dtype == kF32 ? silu : static_cast<float>(BFloat16(silu));
      y.push_back(static_cast<double>(rounded) * gate_up.Get((2 * row + 1) * dim + d));
    }
  }
  return y;
}

TEST(SiluMul, AgreesWithDoubleReferenceForAllShapes) {
  ThreadExecutor executor(3);
  for (DType dtype : {kF32, kBf16}) {
    for (const auto& [tokens, dim] : std::vector<std::pair<int64_t, int64_t>>{
             {1, 1}, {2, 7}, {3, 8}, {1, 9}, {5, 768}, {300, 130}}) {
      TestTensor gate_up(dtype, {tokens, 2 * dim}), y(dtype, {tokens, dim});
      gate_up.Fill(1);
      ASSERT_TRUE(SiluMul({.gate_up = gate_up.view(), .y = y.view()}, executor).ok());
      // In bfloat16, silu may round to a neighbour when it lies near the middle.
      EXPECT_TRUE(AllClose(y.Values(), Reference(gate_up, dtype),
                           {.absolute = 1e-37, .relative = dtype == kF32 ? 1e-6 : 1.0 / 100},
                           y.shape()));
    }
  }
}

TEST(SiluMul, ElementDoesNotDependOnItsPlace) {
  SerialExecutor executor;
  const int64_t dim = 29;
  TestTensor gate_up(kF32, {1, 2 * dim}), y(kF32, {1, dim});
  for (int64_t d = 0; d < 2 * dim; ++d) gate_up.Set(d, d < dim ? -1.2345f : 0.6789f);
  ASSERT_TRUE(SiluMul({.gate_up = gate_up.view(), .y = y.view()}, executor).ok());
  for (int64_t d = 1; d < dim; ++d) EXPECT_EQ(y.Get(d), y.Get(0)) << d;
}

// All magnitudes, both signs, NaN and infinities, for each form of the loop.
void ExpectReferenceForExtremeGates(void (*run)(const SiluMulRows&, int64_t, int64_t)) {
  std::vector<float> gates = {0.0f, -0.0f, 88.0f, -88.0f, 89.5f, -89.5f, kInf, -kInf, kNan};
  for (int exponent = -140; exponent <= 126; ++exponent) {
    gates.push_back(std::ldexp(1.3f, exponent));
    gates.push_back(std::ldexp(-1.3f, exponent));
  }
  for (float g = -100; g < 100; g += 0.37f) gates.push_back(g);
  const auto dim = static_cast<int64_t>(gates.size());
  for (DType dtype : {kF32, kBf16}) {
    TestTensor gate_up(dtype, {1, 2 * dim}), y(dtype, {1, dim});
    for (int64_t d = 0; d < dim; ++d) {
      gate_up.Set(d, gates[static_cast<size_t>(d)]);
      gate_up.Set(dim + d, 1);
    }
    run({.gate_up = gate_up.view().data(), .y = y.view().data(), .dtype = dtype, .dim = dim}, 0, 1);
    EXPECT_TRUE(AllClose(y.Values(), Reference(gate_up, dtype),
                         {.absolute = 1e-36, .relative = dtype == kF32 ? 1e-6 : 1.0 / 128}));
  }
}

TEST(SiluMul, PlainRowsFollowTheFormulaForExtremeGates) {
  ExpectReferenceForExtremeGates(RunSiluMulRows);
}

TEST(SiluMul, RowsOverVectorsFollowTheFormulaForExtremeGates) {
  tests::ForEachVectorForm<decltype(RunSiluMulRows)>(
      {.portable = RunSiluMulRows,
       .neon = KVASIR_ON_ARM(RunSiluMulRowsNeon),
       .avx2 = KVASIR_ON_X86(RunSiluMulRowsAvx2),
       .avx512 = KVASIR_ON_X86(RunSiluMulRowsAvx512)},
      ExpectReferenceForExtremeGates);
}

TEST(SiluMul, NoTokensAreNoWorkAndBadArgumentsAreErrors) {
  SerialExecutor executor;
  TestTensor gate_up(kF32, {0, 8}), y(kF32, {0, 4}), y_bf16(kBf16, {0, 4}), wide(kF32, {0, 8});
  using absl::StatusCode;
  const auto run = [&](const TensorView& in, const TensorView& out) {
    return SiluMul({.gate_up = in, .y = out}, executor).code();
  };
  EXPECT_EQ(run(gate_up.view(), y.view()), StatusCode::kOk);
  EXPECT_EQ(run(gate_up.view(), y_bf16.view()), StatusCode::kInvalidArgument);
  EXPECT_EQ(run(gate_up.view(), wide.view()), StatusCode::kInvalidArgument);
  EXPECT_EQ(run(gate_up.view(), TensorView(y.view().data(), kF32, {0, 4}, Device::kCuda)),
            StatusCode::kUnimplemented);
}

}  // namespace
}  // namespace kvasir::kernels
