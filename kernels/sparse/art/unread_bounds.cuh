// The guard of `art` on the GPU (unread_mass.h): upper bounds, from page bounds, of the logits of
// pages that a row has not read. For art_attend.cu.
#pragma once

#include "kernels/attention/page_pipeline.cuh"
#include "kernels/sparse/common/select_row.cuh"

namespace kvasir::kernels {

// Largest error, as a share of a pair's product, when a rotated query or key is rounded.
inline constexpr float kRotatedRounding = 0x1p-7f;

// The bounds of a pair of elements half a head apart.
struct PairBounds {
  __device__ PairBounds(const BFloat16* page_bounds, int i, int half)
      : low_x(static_cast<float>(page_bounds[i])),
        low_y(static_cast<float>(page_bounds[half + i])),
        high_x(static_cast<float>(page_bounds[2 * half + i])),
        high_y(static_cast<float>(page_bounds[3 * half + i])) {}
  float low_x, low_y, high_x, high_y;

  // Bound of u with the keys in the box. NaN stays NaN.
  __device__ float Box(float2 u) const {
    return (u.x > 0 ? 0.0f : u.x) * low_x + (u.x < 0 ? 0.0f : u.x) * high_x +
           (u.y > 0 ? 0.0f : u.y) * low_y + (u.y < 0 ? 0.0f : u.y) * high_y;
  }
  // Bound of u, turned by at most `turn`, with the keys in the box.
  __device__ float Near(float2 u, float turn) const {
    const float far_x = fmaxf(fabsf(low_x), fabsf(high_x));
    const float far_y = fmaxf(fabsf(low_y), fabsf(high_y));
    const float longest = sqrtf((u.x * u.x + u.y * u.y) * (far_x * far_x + far_y * far_y));
    return fminf(longest, Box(u) + turn * longest) + kRotatedRounding * longest;
  }
};

// Writes to[g] = the bound of the item's logits for head g, plus the logarithm of its number of
// tokens, so that its exp bounds their weight together. NaN, which bounds nothing, gives infinity.
// By a warp.
template <int kHeadDim, bool kRotates>
__device__ void BoundItem(const AttendLaunch& p, const PageRun& run, int64_t index, float* to) {
  constexpr int kHalf = kHeadDim / 2;
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const SelectionHeader& header = p.headers[run.row];
  const SelectionEntry* list = p.entries + run.row * p.capacity;
  const RowItem item = FindItem(run.items, header, list, index);
  const int64_t kv_heads = p.kv.layout.num_kv_heads;
  const int64_t kv_head = run.row % kv_heads;
  const bool is_there = item.mask != 0 && p.kv.extent(run.tile.slot, item.page) >= 0;
  if (!is_there) {
    for (int g = lane; g < p.group; g += kWarpThreads) to[g] = kMinusInfinity;
    return;
  }
  const auto* bounds =
      reinterpret_cast<const BFloat16*>(p.kv.Bounds(run.tile.slot, item.page, p.layer, kv_head));
  int64_t distance = 0, reach = 0;
  float scale = p.scale;
  if constexpr (kRotates) {
    const ItemPositions positions = FindPositions(run.items, header, list, index);
    const int64_t first = positions.of(__ffsll(static_cast<long long>(item.mask)) - 1);
    const int64_t last = positions.of(63 - __clzll(static_cast<long long>(item.mask)));
    const int64_t middle = (first + last) / 2;
    distance = QueryPosition(header, run.tile.first_position) - middle;
    reach = last - middle;
    scale *= p.rope.attention_scaling;
  }
  const __nv_bfloat16* queries =
      p.q + (run.tile.first_row * kv_heads + kv_head) * p.group * kHeadDim;
  for (int g = 0; g < p.group; ++g) {
    float sum = 0;
    for (int i = lane; i < kHalf; i += kWarpThreads) {
      const PairBounds pair(bounds, i, kHalf);
      const float2 q = {__bfloat162float(queries[g * kHeadDim + i]),
                        __bfloat162float(queries[g * kHeadDim + kHalf + i])};
      if constexpr (kRotates) {
        const float turn = static_cast<float>(p.rope.inv_freq[i] * static_cast<double>(reach));
        sum += pair.Near(RotationAt(p.rope, kHalf, distance).Rotate(i, q.x, q.y), turn);
      } else {
        sum += pair.Box(q);
      }
    }
    for (int step = kWarpThreads / 2; step > 0; step /= 2) {
      sum += __shfl_xor_sync(kAllLanes, sum, step);
    }
    if (lane != 0) continue;
    const float tokens = logf(static_cast<float>(CountBits(item.mask)));
    to[g] = isnan(sum) ? INFINITY : scale * sum + tokens;
  }
}

// Replaces each of n values, `stride` apart, by the sum of exp(value - unit) over itself and all
// later ones. The value after the last becomes 0. By a warp.
__device__ inline void SumFromTheEnd(float* values, int n, int stride, float unit) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int share = (n + kWarpThreads - 1) / kWarpThreads;
  const int begin = min(n, lane * share);
  const int end = min(n, begin + share);
  float own = 0;
  for (int i = begin; i < end; ++i) own += expf(values[int64_t{i} * stride] - unit);
  float behind = own;  // `own` included
  for (int distance = 1; distance < kWarpThreads; distance *= 2) {
    const float more = __shfl_down_sync(kAllLanes, behind, static_cast<unsigned>(distance));
    if (lane + distance < kWarpThreads) behind += more;
  }
  // Not by subtracting `own`: infinity would give NaN.
  float sum = __shfl_down_sync(kAllLanes, behind, 1u);
  if (lane == kWarpThreads - 1) {
    sum = 0;
    values[int64_t{n} * stride] = 0;
  }
  for (int i = end - 1; i >= begin; --i) {
    sum += expf(values[int64_t{i} * stride] - unit);
    values[int64_t{i} * stride] = sum;
  }
}

}  // namespace kvasir::kernels
