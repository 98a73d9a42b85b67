// Internal to this folder: one element of a random tensor, for the CPU and the GPU. Called by
// random_fill.cc and elementwise.cu.
#pragma once

#include <cstdint>

#include "kernels/base/dtype.h"
#include "kernels/base/host_device.h"

namespace kvasir::kernels {

// Returns a number uniform in [0, 1), a multiple of 2^-53: the finalizer of SplitMix64 over a
// counter. Source: Steele et al., "Fast splittable pseudorandom number generators", OOPSLA 2014.
KVASIR_HOST_DEVICE inline double UniformOf(uint64_t seed, uint64_t counter) {
  uint64_t x = seed + (counter + 1) * 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  x ^= x >> 31;
  return static_cast<double>(x >> 11) * 0x1.0p-53;
}

struct RandomRows {
  void* y;  // [rows][cols]
  DType dtype;
  int64_t cols;
  int64_t first;  // index of y's first element in the whole tensor
  int64_t width;  // columns of the whole tensor
  uint64_t seed;
  double mean;
  double spread;

  KVASIR_HOST_DEVICE void Fill(int64_t i) const {
    const int64_t place = first + i / cols * width + i % cols;
    const double u = UniformOf(seed, static_cast<uint64_t>(place));
    const auto value = static_cast<float>(mean + spread * (2 * u - 1));
    if (dtype == DType::kFloat32) {
      static_cast<float*>(y)[i] = value;
    } else {
      static_cast<BFloat16*>(y)[i] = BFloat16(value);
    }
  }
};

}  // namespace kvasir::kernels
