// Internal to this folder: makes the codes of a key as EncodeKeys of key_codes.h does, by one warp.
// Compiled without fused multiply-add, so that all bytes equal the CPU's. Called by append and by
// EncodePages.
#pragma once

#include "kernels/append/key_code_math.h"
#include "kernels/base/warp.cuh"

namespace kvasir::kernels {

// Codes the key whose element i is at(i). Called by one warp. Lane w has the elements of word w.
// Among equal elements the first is the least, because zeros differ in sign: neighbours are
// compared first and the left one is kept.
template <typename At>
__device__ void EncodeKey(const KvLayout& layout, const At& at, const TokenCodes& to) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int64_t begin = lane * kWordCodes;
  const int64_t end = min(begin + kWordCodes, layout.head_dim);
  float least = INFINITY;
  float greatest = -INFINITY;
  bool has_nan = false;
  for (int64_t i = begin; i < end; ++i) {
    const float element = CodedElement(static_cast<float>(at(i)));
    least = element < least ? element : least;
    greatest = greatest < element ? element : greatest;
    has_nan |= isnan(element) != 0;
  }
  for (int distance = 1; distance < kWarpThreads; distance *= 2) {
    const float right_least = __shfl_down_sync(kAllLanes, least, distance);
    const float right_greatest = __shfl_down_sync(kAllLanes, greatest, distance);
    least = right_least < least ? right_least : least;
    greatest = greatest < right_greatest ? right_greatest : greatest;
  }
  has_nan = __any_sync(kAllLanes, has_nan) != 0;
  const KeyGrid grid =
      MakeKeyGrid(__shfl_sync(kAllLanes, least, 0), __shfl_sync(kAllLanes, greatest, 0), has_nan);
  if (lane == 0) {
    *to.scale = grid.scale;
    *to.zero = grid.zero;
  }
  if (begin >= end) return;
  const float scale = static_cast<float>(grid.scale);
  const float zero = static_cast<float>(grid.zero);
  uint32_t word = 0;
  for (int64_t i = begin; i < end && scale != 0; ++i) {
    word |= EncodeElement(static_cast<float>(at(i)), i, scale, zero);
  }
  to.words[lane] = word;
}

}  // namespace kvasir::kernels
