// How long randomized tests run: their own number of operations in CI, more by KVASIR_TEST_SCALE
// (KVASIR_TEST_SCALE=100 for a soak). Thread-safe.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace kvasir::testing {

inline int64_t Iterations(int64_t in_ci) {
  const char* scale = std::getenv("KVASIR_TEST_SCALE");
  return scale == nullptr ? in_ci : in_ci * std::strtol(scale, nullptr, 10);
}

}  // namespace kvasir::testing
