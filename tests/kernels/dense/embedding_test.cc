#include "kernels/dense/embedding.h"

#include <gtest/gtest.h>
#include <vector>

#include "tests/support/test_tensor.h"

namespace kvasir::kernels {
namespace {

using tests::TestTensor;

constexpr auto kF32 = DType::kFloat32;
constexpr auto kBf16 = DType::kBFloat16;

TensorView Ids(std::vector<int32_t>& ids) {
  return {ids.data(), DType::kInt32, {static_cast<int64_t>(ids.size())}};
}

TEST(Embedding, CopiesTheRowsOfTheIds) {
  for (DType dtype : {kF32, kBf16}) {
    TestTensor table(dtype, {11, 5}), y(dtype, {4, 5});
    table.Fill(1);
    std::vector<int32_t> ids = {10, 0, 3, 10};
    ASSERT_TRUE(Embedding({.table = table.view(), .ids = Ids(ids), .y = y.view()}).ok());
    for (int64_t t = 0; t < 4; ++t) {
      for (int64_t d = 0; d < 5; ++d) {
        EXPECT_EQ(y.Get(t * 5 + d), table.Get(ids[static_cast<size_t>(t)] * 5 + d));
      }
    }
  }
}

TEST(Embedding, IdOutOfRangeIsAnErrorAndWritesNothing) {
  TestTensor table(kF32, {11, 5}), y(kF32, {3, 5});
  table.Fill(1);
  for (int32_t bad : {-1, 11, 2147483647, -2147483647 - 1}) {
    std::vector<int32_t> ids = {1, 2, bad};
    const absl::Status status = Embedding({.table = table.view(), .ids = Ids(ids), .y = y.view()});
    EXPECT_EQ(status.code(), absl::StatusCode::kOutOfRange) << status;
    EXPECT_EQ(y.Values(), std::vector<double>(15, 0.0));
  }
}

TEST(Embedding, NoIdsAreNoWorkAndBadArgumentsAreErrors) {
  TestTensor table(kF32, {11, 5}), y(kF32, {0, 5}), y_bf16(kBf16, {0, 5});
  std::vector<int32_t> ids;
  using absl::StatusCode;
  EmbeddingParams params = {
      .table = table.view(), .ids = TensorView(nullptr, DType::kInt32, {0}), .y = y.view()};
  EXPECT_TRUE(Embedding(params).ok());
  params.y = y_bf16.view();
  EXPECT_EQ(Embedding(params).code(), StatusCode::kInvalidArgument);
  params.y = TensorView(y.view().data(), kF32, {0, 5}, Device::kCuda);
  EXPECT_EQ(Embedding(params).code(), StatusCode::kUnimplemented);
  params.y = y.view();
  params.ids = TensorView(nullptr, kF32, {0});
  EXPECT_EQ(Embedding(params).code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace kvasir::kernels
