// A tensor that owns its memory and whose elements are read and written as float, whatever its
// dtype (float32 or bfloat16). For tests of ops. Thread-compatible.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "kernels/base/status_macros.h"
#include "kernels/base/tensor.h"

namespace kvasir::tests {

class TestTensor {
 public:
  TestTensor(kernels::DType dtype, std::vector<int64_t> shape)
      : dtype_(dtype), shape_(std::move(shape)) {
    KVASIR_CHECK(!shape_.empty() && shape_.size() <= 3);
    // One byte more, so that a tensor without elements has memory too.
    bytes_.resize(static_cast<size_t>(view().size_bytes()) + 1);
  }

  kernels::TensorView view() {
    const std::vector<int64_t>& s = shape_;
    if (s.size() == 1) return {bytes_.data(), dtype_, {s[0]}};
    if (s.size() == 2) return {bytes_.data(), dtype_, {s[0], s[1]}};
    return {bytes_.data(), dtype_, {s[0], s[1], s[2]}};
  }
  const std::vector<int64_t>& shape() const { return shape_; }
  int64_t size() { return view().num_elements(); }

  void Set(int64_t i, float value) {
    if (dtype_ == kernels::DType::kFloat32) {
      view().As<float>()[i] = value;
    } else {
      view().As<kernels::BFloat16>()[i] = kernels::BFloat16(value);
    }
  }
  float Get(int64_t i) {
    return dtype_ == kernels::DType::kFloat32
               ? view().As<float>()[i]
               : static_cast<float>(view().As<kernels::BFloat16>()[i]);
  }
  std::vector<double> Values() {
    std::vector<double> values;
    for (int64_t i = 0; i < size(); ++i) values.push_back(Get(i));
    return values;
  }

  // Normal values of mixed magnitude (times 2^-3 to 2^3), so that a change in the order of sums
  // shows in their last bits.
  void Fill(uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::uniform_int_distribution<int> exponent(-3, 3);
    for (int64_t i = 0; i < size(); ++i) Set(i, std::ldexp(normal(random), exponent(random)));
  }

 private:
  kernels::DType dtype_;
  std::vector<int64_t> shape_;
  std::vector<std::byte> bytes_;
};

}  // namespace kvasir::tests
