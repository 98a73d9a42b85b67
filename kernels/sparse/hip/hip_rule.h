// The arithmetic of hip's search (hip_selector.h), shared by CPU and GPU. Thread-safe.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/base/host_device.h"

namespace kvasir::kernels {

inline constexpr int64_t kHipBlockTokens = 2;
inline constexpr int64_t kHipQueryStride = 2;

// Number of blocks of 2 tokens in a budget, or in candidates.
KVASIR_HOST_DEVICE constexpr int64_t CeilHipBlocks(int64_t tokens) {
  return (tokens + kHipBlockTokens - 1) / kHipBlockTokens;
}

// Number of sampled queries of a query tile: those whose logits count, HipSample(s, num_rows) for
// each s.
KVASIR_HOST_DEVICE constexpr int64_t NumHipSamples(int64_t num_rows) {
  return (num_rows + kHipQueryStride - 1) / kHipQueryStride;
}
KVASIR_HOST_DEVICE constexpr int64_t HipSample(int64_t s, int64_t num_rows) {
  return std::min(s * kHipQueryStride + kHipQueryStride, num_rows) - 1;
}

// Begin of node j of the `count` nodes that the search starts with: j blocks / count, halves
// rounded up.
KVASIR_HOST_DEVICE constexpr int64_t HipNodeBegin(int64_t j, int64_t blocks, int64_t count) {
  return (2 * j * blocks + count) / (2 * count);
}
// Length of the longest of these nodes, and of the longest half of a node of `longest` blocks.
KVASIR_HOST_DEVICE constexpr int64_t LongestHipNode(int64_t blocks, int64_t count) {
  return (blocks + count - 1) / count;
}
KVASIR_HOST_DEVICE constexpr int64_t LongestHipHalf(int64_t longest) {
  return longest - longest / 2;
}

}  // namespace kvasir::kernels
