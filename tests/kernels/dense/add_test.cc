#include "kernels/dense/add.h"

#include <cstring>
#include <gtest/gtest.h>
#include <limits>

#include "kernels/dense/elementwise.h"
#include "tests/support/cpu_forms.h"
#include "tests/support/test_tensor.h"

namespace kvasir::kernels {
namespace {

using tests::TestTensor;

constexpr auto kF32 = DType::kFloat32;
constexpr auto kBf16 = DType::kBFloat16;
constexpr float kHuge = std::numeric_limits<float>::max();  // bfloat16 rounds it to infinity

TEST(AddTo, RoundsTheSummandAndTheSum) {
  SerialExecutor executor;
  for (const DType x_dtype : {kF32, kBf16}) {
    for (const DType y_dtype : {kF32, kBf16}) {
      TestTensor x(x_dtype, {3, 37}), y(y_dtype, {3, 37});
      x.Fill(1);
      y.Fill(2);
      x.Set(5, std::numeric_limits<float>::quiet_NaN());
      TestTensor before = y;
      ASSERT_TRUE(AddTo(x.view(), y.view(), executor).ok());
      const auto round = [&](float value) {
        return y_dtype == kF32 ? value : static_cast<float>(BFloat16(value));
      };
      for (int64_t i = 0; i < x.size(); ++i) {
        if (i == 5) {
          EXPECT_TRUE(std::isnan(y.Get(i)));
        } else {
          EXPECT_EQ(y.Get(i), round(before.Get(i) + round(x.Get(i)))) << i;
        }
      }
    }
  }
}

// Widths with a rest of every length, and values that round to infinity.
TEST(AddTo, VectorsComputeTheBitsOfThePlainLoop) {
  const IsaForms<void(const AddRows&, int64_t, int64_t)> forms = {
      .portable = RunAddRows,
      .neon = KVASIR_ON_ARM(RunAddRowsNeon),
      .avx2 = KVASIR_ON_X86(RunAddRowsAvx2),
      .avx512 = KVASIR_ON_X86(RunAddRowsAvx512)};
  tests::ForEachVectorForm(forms, [](const auto run) {
    for (const DType x_dtype : {kF32, kBf16}) {
      for (const DType y_dtype : {kF32, kBf16}) {
        for (int64_t dim = 1; dim <= 49; ++dim) {
          TestTensor x(x_dtype, {3, dim}), y(y_dtype, {3, dim});
          x.Fill(1);
          y.Fill(2);
          x.Set(dim, kHuge);
          x.Set(2 * dim, -std::numeric_limits<float>::infinity());
          TestTensor plain = y;
          AddRows rows = {x.view().data(), y.view().data(), x_dtype, y_dtype, dim};
          run(rows, 1, 3);
          rows.y = plain.view().data();
          RunAddRows(rows, 1, 3);
          EXPECT_EQ(0, std::memcmp(y.view().data(), plain.view().data(),
                                   static_cast<size_t>(y.view().size_bytes())))
              << DTypeName(x_dtype) << " to " << DTypeName(y_dtype) << ", width " << dim;
        }
      }
    }
  });
}

TEST(AddTo, NothingIsAddedAndWrongShapesAreRefused) {
  SerialExecutor executor;
  TestTensor none(kF32, {0, 4}), two(kF32, {2, 4}), other(kF32, {2, 5});
  EXPECT_TRUE(AddTo(none.view(), none.view(), executor).ok());
  EXPECT_EQ(AddTo(two.view(), other.view(), executor).code(), absl::StatusCode::kInvalidArgument);
  const TensorView on_gpu(two.view().data(), kF32, {2, 4}, Device::kCuda);
  EXPECT_EQ(AddTo(on_gpu, two.view(), executor).code(), absl::StatusCode::kUnimplemented);
}

}  // namespace
}  // namespace kvasir::kernels
