// Bfloat16 bounds of pages in registers, as the left operand of matrix products with queries that
// are split by sign (quest_score.h). For kernels that score pages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cuda_bf16.h>

#include "kernels/sparse/page_scores/quest_rule.h"

namespace kvasir::kernels {

__device__ inline uint32_t PairOf(float low, float high) {
  const __nv_bfloat162 pair = {__float2bfloat16_rn(low), __float2bfloat16_rn(high)};
  return *reinterpret_cast<const uint32_t*>(&pair);
}
// The min and max parts of two elements of a query, as bfloat16.
__device__ inline uint32_t PairForMin(const float2& q, float low_weight) {
  return PairOf(ForMin(q.x, low_weight), ForMin(q.y, low_weight));
}
__device__ inline uint32_t PairForMax(const float2& q, float low_weight) {
  return PairOf(ForMax(q.x, low_weight), ForMax(q.y, low_weight));
}

// Bounds of two pages as operands: at[i] is that of step i. A thread reads 8 adjacent elements of a
// page's bounds, but in a product of 16 columns thread c of four needs columns 2 c, 2 c + 1, 2 c +
// 8 and 2 c + 9. So columns are permuted, for pages and queries alike: of 32, the elements 8 c .. 8
// c + 7 become those columns of two products.
template <int kHeadDim>
struct PageTile {
  static constexpr int kSteps = 2 * kHeadDim / 16;
  uint32_t at[kSteps][4];

  // Loads page `which` of the two from its bounds; zeros if `bounds` is null.
  __device__ void Load(const std::byte* bounds, int which, int column_thread) {
#pragma unroll
    for (int i = 0; i < kSteps / 2; ++i) {
      uint4 part = {};
      if (bounds != nullptr) {
        part = __ldg(reinterpret_cast<const uint4*>(bounds) + i * 4 + column_thread);
      }
      at[2 * i][which] = part.x;
      at[2 * i][2 + which] = part.y;
      at[2 * i + 1][which] = part.z;
      at[2 * i + 1][2 + which] = part.w;
    }
  }
};

}  // namespace kvasir::kernels
