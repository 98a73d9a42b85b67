#include "worker/checkpoint/convert_elements.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <gtest/gtest.h>
#include <limits>
#include <vector>

namespace kvasir::worker {
namespace {

using kernels::BFloat16;
using kernels::DType;

template <typename T>
std::vector<std::byte> BytesOf(const std::vector<T>& values) {
  std::vector<std::byte> bytes(values.size() * sizeof(T));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

// The value of half-precision bits by its definition.
float HalfValue(uint16_t bits) {
  const int exponent = bits >> 10 & 31;
  const int mantissa = bits & 1023;
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  return static_cast<float>(bits >> 15 != 0 ? -magnitude : magnitude);
}

TEST(ConvertElements, EveryFiniteHalfIsExactInFloat32) {
  std::vector<uint16_t> halves;
  for (int bits = 0; bits < 65536; ++bits) {
    if ((bits & 0x7c00) != 0x7c00) halves.push_back(static_cast<uint16_t>(bits));
  }
  std::vector<float> out(halves.size());
  EXPECT_EQ(ConvertElements(DType::kFloat16, BytesOf(halves), DType::kFloat32,
                            reinterpret_cast<std::byte*>(out.data())),
            -1);
  for (size_t i = 0; i < halves.size(); ++i) {
    EXPECT_EQ(std::bit_cast<uint32_t>(out[i]), std::bit_cast<uint32_t>(HalfValue(halves[i])));
  }
}

TEST(ConvertElements, BFloat16RoundTripsAndFloat32RoundsToNearestEven) {
  std::vector<uint16_t> bits(32640);  // all non-negative finite numbers
  for (size_t i = 0; i < bits.size(); ++i) bits[i] = static_cast<uint16_t>(i);
  std::vector<float> wide(bits.size());
  std::vector<uint16_t> narrow(bits.size());
  EXPECT_EQ(ConvertElements(DType::kBFloat16, BytesOf(bits), DType::kFloat32,
                            reinterpret_cast<std::byte*>(wide.data())),
            -1);
  EXPECT_EQ(ConvertElements(DType::kFloat32, BytesOf(wide), DType::kBFloat16,
                            reinterpret_cast<std::byte*>(narrow.data())),
            -1);
  EXPECT_EQ(narrow, bits);

  const std::vector<float> halfway = {1.0f + 0x1p-8f, 1.0f + 3 * 0x1p-8f};
  std::vector<BFloat16> rounded(2);
  ConvertElements(DType::kFloat32, BytesOf(halfway), DType::kBFloat16,
                  reinterpret_cast<std::byte*>(rounded.data()));
  EXPECT_EQ(static_cast<float>(rounded[0]), 1.0f);
  EXPECT_EQ(static_cast<float>(rounded[1]), 1.0f + 0x1p-6f);
}

TEST(ConvertElements, FindsTheFirstNumberThatIsNotFinite) {
  const float bad_floats[] = {std::nanf(""), std::numeric_limits<float>::infinity(),
                              -std::numeric_limits<float>::infinity()};
  for (const DType to : {DType::kFloat32, DType::kBFloat16}) {
    std::vector<std::byte> out(400);
    for (const float bad : bad_floats) {
      std::vector<float> values(100, 1.0f);
      values[37] = values[90] = bad;
      EXPECT_EQ(ConvertElements(DType::kFloat32, BytesOf(values), to, out.data()), 37);
      std::vector<BFloat16> narrow(100);
      narrow[99] = BFloat16(bad);
      EXPECT_EQ(ConvertElements(DType::kBFloat16, BytesOf(narrow), to, out.data()), 99);
    }
    for (const int bits : {0x7c00, 0xfc00, 0x7c01, 0xffff}) {
      std::vector<uint16_t> halves(100);
      halves[0] = static_cast<uint16_t>(bits);
      EXPECT_EQ(ConvertElements(DType::kFloat16, BytesOf(halves), to, out.data()), 0);
    }
  }
}

TEST(ConvertElements, ElementsOfTheSameDtypeMayStayWhereTheyAre) {
  std::vector<BFloat16> values(1000, BFloat16(1.5f));
  values[700] = BFloat16(std::nanf(""));
  const std::vector<BFloat16> before = values;
  EXPECT_EQ(ConvertElements(DType::kBFloat16, BytesOf(values), DType::kBFloat16,
                            reinterpret_cast<std::byte*>(values.data())),
            700);
  EXPECT_EQ(std::memcmp(values.data(), before.data(), 2000), 0);
}

// Found at any place among the elements that are checked together, and beside any neighbour.
TEST(ConvertElements, OneThatIsNotFiniteIsFoundAnywhere) {
  for (const size_t count : {1u, 4u, 7u, 64u}) {
    for (size_t bad = 0; bad < count; ++bad) {
      for (const uint32_t neighbour : {0x0000u, 0x7f7fu, 0xff7fu, 0x8000u}) {
        std::vector<uint16_t> values(count, static_cast<uint16_t>(neighbour));
        std::vector<uint16_t> out(count);
        auto* const to = reinterpret_cast<std::byte*>(out.data());
        EXPECT_EQ(ConvertElements(DType::kBFloat16, BytesOf(values), DType::kBFloat16, to), -1);
        values[bad] = 0xff80;
        EXPECT_EQ(ConvertElements(DType::kBFloat16, BytesOf(values), DType::kBFloat16, to),
                  static_cast<int64_t>(bad));
        std::vector<float> wide(count, std::bit_cast<float>(neighbour << 16 | 0xffffu));
        std::vector<float> same(count);
        auto* const wide_to = reinterpret_cast<std::byte*>(same.data());
        EXPECT_EQ(ConvertElements(DType::kFloat32, BytesOf(wide), DType::kFloat32, wide_to), -1);
        wide[bad] = std::numeric_limits<float>::infinity();
        EXPECT_EQ(ConvertElements(DType::kFloat32, BytesOf(wide), DType::kFloat32, wide_to),
                  static_cast<int64_t>(bad));
      }
    }
  }
}

TEST(ConvertElements, ANumberTooLargeForBFloat16IsFound) {
  const std::vector<float> values = {3.3e38f, std::numeric_limits<float>::max()};
  std::vector<std::byte> out(8);
  EXPECT_EQ(ConvertElements(DType::kFloat32, BytesOf(values), DType::kFloat32, out.data()), -1);
  EXPECT_EQ(ConvertElements(DType::kFloat32, BytesOf(values), DType::kBFloat16, out.data()), 1);
}

}  // namespace
}  // namespace kvasir::worker
