// The arithmetic of hip's search (hip_selector.h), for CPU and GPU alike. Thread-safe.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/base/host_device.h"

namespace kvasir::kernels {

inline constexpr int64_t kHipBlockTokens = 2;
inline constexpr int64_t kHipQueryStride = 2;

// Of a budget, or of candidates.
KVASIR_HOST_DEVICE constexpr int64_t CeilHipBlocks(int64_t tokens) {
  return (tokens + kHipBlockTokens - 1) / kHipBlockTokens;
}

// Of a query block, those whose logits count: query HipSample(s, num_rows) for each s.
KVASIR_HOST_DEVICE constexpr int64_t NumHipSamples(int64_t num_rows) {
  return (num_rows + kHipQueryStride - 1) / kHipQueryStride;
}
KVASIR_HOST_DEVICE constexpr int64_t HipSample(int64_t s, int64_t num_rows) {
  return std::min(s * kHipQueryStride + kHipQueryStride, num_rows) - 1;
}

// Where the node j of `count` begins that the search sets out with: j blocks / count, halves up.
KVASIR_HOST_DEVICE constexpr int64_t HipNodeBegin(int64_t j, int64_t blocks, int64_t count) {
  return (2 * j * blocks + count) / (2 * count);
}
// The length of the longest of these, and of the longest half of a node of `longest` blocks.
KVASIR_HOST_DEVICE constexpr int64_t LongestHipNode(int64_t blocks, int64_t count) {
  return (blocks + count - 1) / count;
}
KVASIR_HOST_DEVICE constexpr int64_t LongestHipHalf(int64_t longest) {
  return longest - longest / 2;
}

}  // namespace kvasir::kernels
