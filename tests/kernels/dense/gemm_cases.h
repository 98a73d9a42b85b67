// Shapes and kinds of products that the tests of gemm.h compute, and the reference in double.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "kernels/base/cpu_isa.h"
#include "kernels/gemm/gemm.h"
#include "tests/support/test_tensor.h"

namespace kvasir::kernels {

inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr auto kF32 = DType::kFloat32;
inline constexpr auto kBf16 = DType::kBFloat16;

inline std::vector<double> Reference(tests::TestTensor& x, tests::TestTensor& w,
                                     tests::TestTensor* bias) {
  const std::vector<double> xs = x.Values(), ws = w.Values();
  const int64_t m = x.shape()[0], k = x.shape()[1], n = w.shape()[0];
  std::vector<double> y;
  for (int64_t row = 0; row < m; ++row) {
    for (int64_t column = 0; column < n; ++column) {
      double sum = bias == nullptr ? 0.0 : bias->Get(column);
      for (int64_t i = 0; i < k; ++i) {
        sum += xs[static_cast<size_t>(row * k + i)] * ws[static_cast<size_t>(column * k + i)];
      }
      y.push_back(sum);
    }
  }
  return y;
}

// What one rounding of the largest product does to a sum of k such products, about.
inline double RoundingScale(tests::TestTensor& x, tests::TestTensor& w) {
  double x_max = 0, w_max = 0;
  for (double v : x.Values()) x_max = std::max(x_max, std::abs(v));
  for (double v : w.Values()) w_max = std::max(w_max, std::abs(v));
  return x_max * w_max * std::sqrt(static_cast<double>(x.shape()[1]));
}

struct Case {
  int64_t m, k, n;
};

inline constexpr Case kCases[] = {{1, 1, 1},     {1, 7, 5},      {3, 16, 64},
                                  {17, 33, 65},  {64, 256, 512}, {65, 100, 129},
                                  {130, 768, 3}, {5, 1100, 200}, {2, 2048, 1030}};

// Every instruction set that the machine has.
inline std::vector<CpuIsa> MachineIsas() {
  std::vector<CpuIsa> isas;
  for (const CpuIsa isa :
       {CpuIsa::kPortable, CpuIsa::kNeon, CpuIsa::kAvx2, CpuIsa::kAvx512, CpuIsa::kAvx512Bf16}) {
    if (CpuHas(isa)) isas.push_back(isa);
  }
  return isas;
}

struct Kind {
  const char* name;
  PackedLinear::Options options;
};

inline constexpr Kind kKinds[] = {
    {"f32", {.input = kF32, .output = kF32}},
    {"bf16", {.input = kBf16, .output = kBf16}},
    {"bf16 to f32", {.input = kBf16, .output = kF32}},
    {"int8", {.input = kBf16, .output = kF32, .weights = WeightForm::kInt8}},
    {"int8 of f32", {.input = kF32, .output = kF32, .weights = WeightForm::kInt8}},
};

}  // namespace kvasir::kernels
