// Votes of heads for tokens, in the kernels of tokenselect.
#pragma once

#include "kernels/base/hopper.cuh"
#include "kernels/base/warp.cuh"
#include "kernels/sparse/tokenselect/tokenselect_launch.h"
#include "kernels/sparse/tokenselect/tokenselect_selector.h"

namespace kvasir::kernels {

// Returns the greatest logit of head g of the row's group and the reciprocal of its softmax's sum;
// 0 and 0 if the head has no votes. By kLanes adjacent lanes; the warp's other lanes may have other
// heads.
template <int kLanes>
__device__ SoftmaxSum MergedParts(const TokenSelectLaunch& p, int64_t row, int g) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int64_t group = p.select.group;
  const SoftmaxSum* parts = p.parts + row * p.blocks_of_row * group + g;
  float max = -INFINITY;
#pragma unroll 4
  for (int64_t i = lane; i < p.blocks_of_row; i += kLanes) {
    max = fmaxf(max, parts[i * group].max);
  }
  for (int distance = 1; distance < kLanes; distance *= 2) {
    max = fmaxf(max, __shfl_xor_sync(kAllLanes, max, distance));
  }
  float sum = 0;
#pragma unroll 4
  for (int64_t i = lane; i < p.blocks_of_row && max > -INFINITY; i += kLanes) {
    sum += parts[i * group].sum * hopper::Exp2(parts[i * group].max - max);
  }
  for (int distance = 1; distance < kLanes; distance *= 2) {
    sum += __shfl_xor_sync(kAllLanes, sum, distance);
  }
  return sum > 0 ? SoftmaxSum{max, 1 / sum} : SoftmaxSum{0, 0};
}

// Returns the vote of a logit. `merged` is from MergedParts.
__device__ inline float VoteOf(float logit, const SoftmaxSum& merged) {
  constexpr float kLeastExponent = kLeastVoteExponent * 1.4426950408889634f;
  const float below = logit - merged.max;
  return below >= kLeastExponent ? hopper::Exp2(below) * merged.sum : 0.0f;
}

// Adds the head's votes for four tokens.
__device__ inline void AddVotes(const float4& logits, const SoftmaxSum& merged, float4& votes) {
  votes.x += VoteOf(logits.x, merged);
  votes.y += VoteOf(logits.y, merged);
  votes.z += VoteOf(logits.z, merged);
  votes.w += VoteOf(logits.w, merged);
}

}  // namespace kvasir::kernels
