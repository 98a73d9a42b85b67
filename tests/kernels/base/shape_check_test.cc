#include "kernels/base/shape_check.h"

#include <gtest/gtest.h>

namespace kvasir::kernels {
namespace {

TEST(ShapeCheck, BindsNamesAndComparesLaterUses) {
  float memory[8] = {};
  ShapeCheck check("op");
  check.Match("x", TensorView(memory, DType::kFloat32, {2, 4}), {"tokens", "hidden"})
      .Match("w", TensorView(memory, DType::kFloat32, {4}), {"hidden"}, DType::kFloat32);
  EXPECT_TRUE(check.status().ok()) << check.status();
  EXPECT_EQ(check.dim("tokens"), 2);
  EXPECT_EQ(check.dim("hidden"), 4);
}

TEST(ShapeCheck, MismatchNamesTensorFoundAndExpected) {
  float memory[8] = {};
  ShapeCheck check("op");
  check.Match("x", TensorView(memory, DType::kFloat32, {2, 4}), {"tokens", "hidden"})
      .Match("w", TensorView(memory, DType::kFloat32, {5}), {"hidden"});
  EXPECT_EQ(check.status().message(), "op: w is float32[5], expected [hidden=4]");
}

TEST(ShapeCheck, WrongRankDtypeNumberAndMissingMemoryAreErrors) {
  float memory[8] = {};
  const TensorView x(memory, DType::kFloat32, {2, 4});
  EXPECT_FALSE(ShapeCheck("op").Match("x", x, {"tokens"}).status().ok());
  EXPECT_FALSE(ShapeCheck("op").Match("x", x, {"t", "h"}, DType::kBFloat16).status().ok());
  EXPECT_FALSE(ShapeCheck("op").Match("x", x, {"t", int64_t{3}}).status().ok());
  const TensorView no_memory(nullptr, DType::kFloat32, {2});
  EXPECT_FALSE(ShapeCheck("op").Match("x", no_memory, {"t"}).status().ok());
}

}  // namespace
}  // namespace kvasir::kernels
