#include "kernels/dense/add.h"

#include <gtest/gtest.h>
#include <limits>

#include "tests/support/test_tensor.h"

namespace kvasir::kernels {
namespace {

using tests::TestTensor;

constexpr auto kF32 = DType::kFloat32;
constexpr auto kBf16 = DType::kBFloat16;

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
