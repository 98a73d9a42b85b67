// Names of a suite's cases, for suites whose parameter is a tuple: its elements in their order,
// such as 128_4_bfloat16. Filters choose cases by them, and keep their meaning when a suite gets
// another case.
#pragma once

#include <cstdint>
#include <gtest/gtest.h>
#include <string>
#include <tuple>

#include "kernels/base/dtype.h"

namespace kvasir::kernels {

inline std::string PartOfCaseName(int64_t number) { return std::to_string(number); }
inline std::string PartOfCaseName(DType dtype) { return std::string(DTypeName(dtype)); }

// The last argument of INSTANTIATE_TEST_SUITE_P.
struct CaseName {
  template <typename First, typename... Rest>
  std::string operator()(const testing::TestParamInfo<std::tuple<First, Rest...>>& test) const {
    return std::apply(
        [](const First& first, const Rest&... rest) {
          return (PartOfCaseName(first) + ... + ("_" + PartOfCaseName(rest)));
        },
        test.param);
  }
};

}  // namespace kvasir::kernels
