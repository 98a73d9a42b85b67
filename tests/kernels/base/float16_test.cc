#include "kernels/base/float16.h"

#include <cmath>
#include <gtest/gtest.h>
#include <limits>

namespace kvasir::kernels {
namespace {

float FromBits(uint32_t bits) {
  Float16 half;
  half.bits = static_cast<uint16_t>(bits);
  return static_cast<float>(half);
}

TEST(Float16, KnownValues) {
  EXPECT_EQ(FromBits(0x3c00), 1.0f);
  EXPECT_EQ(FromBits(0xc000), -2.0f);
  EXPECT_EQ(FromBits(0x0001), 0x1p-24f);
  EXPECT_EQ(FromBits(0x03ff), 0x1p-14f - 0x1p-24f);
  EXPECT_EQ(FromBits(0x0400), 0x1p-14f);
  EXPECT_EQ(FromBits(0x7bff), kFloat16Max);
  EXPECT_EQ(FromBits(0x7c00), std::numeric_limits<float>::infinity());
  EXPECT_TRUE(std::signbit(FromBits(0x8000)));
  EXPECT_TRUE(std::isnan(FromBits(0x7e00)));
}

// Tests all finite numbers, and the points halfway between neighbours.
TEST(Float16, RoundsToNearestEven) {
  for (uint32_t bits = 0; bits < 0x7bff; ++bits) {
    const float low = FromBits(bits), high = FromBits(bits + 1);
    const float half = low + (high - low) / 2;
    EXPECT_EQ(Float16(low).bits, bits);
    EXPECT_EQ(Float16(-low).bits, bits | 0x8000u);
    EXPECT_EQ(Float16(std::nextafter(half, 0.0f)).bits, bits);
    EXPECT_EQ(Float16(half).bits, bits + bits % 2) << "ties go to the even one";
    EXPECT_EQ(Float16(std::nextafter(half, high)).bits, bits + 1);
  }
  EXPECT_EQ(Float16(65519.996f).bits, 0x7bff);
  EXPECT_EQ(Float16(65520.0f).bits, 0x7c00);
  EXPECT_TRUE(std::isnan(static_cast<float>(Float16(std::nanf("")))));
}

TEST(Float16, RoundingUpIsNeverBelow) {
  for (uint32_t bits = 0; bits < 0x7bff; ++bits) {
    const float low = FromBits(bits);
    EXPECT_EQ(RoundUpToFloat16(low).bits, bits);
    EXPECT_EQ(RoundUpToFloat16(std::nextafter(low, 1e6f)).bits, bits + 1);
  }
  EXPECT_EQ(RoundUpToFloat16(1e-30f).bits, 1);
}

}  // namespace
}  // namespace kvasir::kernels
