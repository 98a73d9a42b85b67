// Compares a computed tensor with its reference: first where infinities and NaNs are, then absolute
// and relative errors; a failure says at which coordinate the worst element lies. For tests of ops:
//
//   EXPECT_TRUE(AllClose(y, expected, {.absolute = 1e-6, .relative = 1e-5}, {tokens, hidden}));
//
// Works on any containers of float, double, BFloat16 (convertible to double). Stateless.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <gtest/gtest.h>
#include <string>
#include <vector>

namespace kvasir::tests {

// An element passes when |actual - expected| <= absolute + relative * |expected|.
struct Tolerance {
  double absolute = 0;
  double relative = 0;
};

// "[2, 0, 17]": the row-major coordinate of an element; the flat index for an empty shape.
inline std::string Coordinate(int64_t index, const std::vector<int64_t>& shape) {
  std::string text;
  for (size_t i = shape.size(); i-- > 0;) {
    const int64_t dim = shape[i] > 0 ? shape[i] : 1;
    text = std::to_string(index % dim) + (text.empty() ? "" : ", ") + text;
    index /= dim;
  }
  return "[" + (shape.empty() ? std::to_string(index) : text) + "]";
}

inline std::string PrintElement(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.9g", value);
  return text;
}

// True when both are finite, the same infinity, or both NaN.
inline bool SameKind(double a, double b) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b);
  if (std::isinf(a) || std::isinf(b)) return a == b;
  return true;
}

template <typename Actual, typename Expected>
::testing::AssertionResult AllClose(const Actual& actual, const Expected& expected,
                                    const Tolerance& tolerance,
                                    const std::vector<int64_t>& shape = {}) {
  if (std::size(actual) != std::size(expected)) {
    return ::testing::AssertionFailure()
           << std::size(actual) << " elements, expected " << std::size(expected);
  }
  const auto describe = [&](size_t i) {
    return Coordinate(static_cast<int64_t>(i), shape) + ": " +
           PrintElement(static_cast<double>(actual[i])) + ", expected " +
           PrintElement(static_cast<double>(expected[i]));
  };
  size_t worst = 0;
  double worst_excess = 0;
  size_t failures = 0;
  for (size_t i = 0; i < std::size(actual); ++i) {
    const auto a = static_cast<double>(actual[i]);
    const auto e = static_cast<double>(expected[i]);
    if (!SameKind(a, e)) {
      return ::testing::AssertionFailure() << "infinity or NaN differs first at " << describe(i);
    }
    if (!std::isfinite(e)) continue;
    const double excess = std::abs(a - e) - (tolerance.absolute + tolerance.relative * std::abs(e));
    if (excess <= 0) continue;
    ++failures;
    if (excess > worst_excess) {
      worst_excess = excess;
      worst = i;
    }
  }
  if (failures == 0) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << failures << " of " << std::size(actual) << " elements differ, the worst at "
         << describe(worst) << ", error "
         << PrintElement(std::abs(static_cast<double>(actual[worst]) -
                                  static_cast<double>(expected[worst])));
}

}  // namespace kvasir::tests
