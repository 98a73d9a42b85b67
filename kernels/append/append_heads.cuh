// Internal to append_heads.cu: heads as attention reads them, the destination of a query tile's
// tokens, and the work that both of its kernels share.
#pragma once

#include <type_traits>

#include "kernels/append/append_heads_launch.h"
#include "kernels/append/key_codes.cuh"
#include "kernels/base/warp.cuh"
#include "kernels/dense/rms_norm.cuh"

namespace kvasir::kernels {
namespace {

// One head of a token, normalized and rotated as attention reads it.
template <typename Activation>
struct Head {
  const Activation* x;     // [head_dim]
  const Activation* norm;  // null: not normalized
  float scale;             // of the norm
  const float* cos;        // [head_dim / 2]; null: not rotated
  const float* sin;
  int64_t half_dim;

  __device__ float Normal(int64_t i) const {
    return static_cast<float>(norm == nullptr ? x[i] : Normalized(x[i], scale, norm[i]));
  }
  __device__ Activation At(int64_t i) const {
    if (cos == nullptr) return norm == nullptr ? x[i] : Activation(Normal(i));
    const bool is_first = i < half_dim;
    const int64_t pair = is_first ? i : i - half_dim;
    const float own = Normal(i);
    const float other = Normal(is_first ? i + half_dim : pair);
    return Activation(is_first ? own * cos[pair] - other * sin[pair]
                               : own * cos[pair] + other * sin[pair]);
  }
};

template <typename Activation>
__device__ const Activation* HeadOf(const AppendHeadsLaunch& p, int64_t token, int64_t head) {
  const int64_t heads = p.num_heads + 2 * p.kv.layout.num_kv_heads;
  return static_cast<const Activation*>(p.qkv) + (token * heads + head) * p.kv.layout.head_dim;
}

// Returns the norm's scale of the head `x` to all lanes. Called by one warp.
template <typename Activation>
__device__ float ScaleOf(const AppendHeadsLaunch& p, const Activation* x) {
  float sum = 0;
  for (int64_t i = threadIdx.x % kWarpThreads; i < p.kv.layout.head_dim; i += kWarpThreads) {
    sum = AddSquare(sum, static_cast<float>(x[i]));
  }
  sum = SumOfLanes(sum);
  return NormScale(&sum, 1, p.kv.layout.head_dim, p.epsilon);
}

template <typename Activation>
__device__ Head<Activation> MakeHead(const AppendHeadsLaunch& p, int64_t token, const Activation* x,
                                     const void* norm, float scale) {
  const int64_t half_dim = p.kv.layout.head_dim / 2;
  const bool rotates = p.cos != nullptr;
  return {.x = x,
          .norm = static_cast<const Activation*>(norm),
          .scale = scale,
          .cos = rotates ? p.cos + token * half_dim : nullptr,
          .sin = rotates ? p.sin + token * half_dim : nullptr,
          .half_dim = half_dim};
}

// Destination of the tokens of one query tile.
template <typename Kv>
struct Target {
  Kv* keys;        // of the tile's first token
  Kv* values;      // likewise
  Kv* bounds;      // of the page; null: not kept
  int64_t offset;  // of the tile's first token in the page
};

template <typename Activation, typename Kv>
__device__ Kv Cached(Activation value) {
  if constexpr (std::is_same_v<Activation, Kv>) {
    return value;
  } else {
    return static_cast<Kv>(static_cast<float>(value));
  }
}

template <typename Kv>
__device__ Target<Kv> TargetOf(const AppendHeadsLaunch& p, const QueryTile& tile, int64_t head) {
  const KvLayout& layout = p.kv.layout;
  const int64_t index = tile.first_position / kPageTokens;
  const int64_t offset = tile.first_position % kPageTokens;
  std::byte* page = p.kv.Peek(tile.slot, index, p.layer, head).page();
  std::byte* bounds =
      p.kv.bounds == nullptr ? nullptr : p.kv.Bounds(tile.slot, index, p.layer, head);
  return {.keys = reinterpret_cast<Kv*>(page) + offset * layout.head_dim,
          .values = reinterpret_cast<Kv*>(page + layout.v_offset()) + offset * layout.head_dim,
          .bounds = reinterpret_cast<Kv*>(bounds),
          .offset = offset};
}

// Writes the scales of the norms of the tile's keys to shared memory, or nothing when keys are not
// normalized. Called by all threads of the CTA.
template <typename Activation>
__device__ void FindScales(const AppendHeadsLaunch& p, const QueryTile& tile, int64_t head,
                           float* scales) {
  if (p.k_norm == nullptr) return;
  const int64_t num_warps = blockDim.x / kWarpThreads;
  __syncthreads();  // the previous tile's scales have been read
  for (int64_t r = threadIdx.x / kWarpThreads; r < tile.num_rows; r += num_warps) {
    const float scale = ScaleOf(p, HeadOf<Activation>(p, tile.first_row + r, p.num_heads + head));
    if (threadIdx.x % kWarpThreads == 0) scales[r] = scale;
  }
  __syncthreads();
}

// Makes the codes of the keys just stored. Called by all threads of the CTA.
template <typename Kv>
__device__ void EncodeKeys(const AppendHeadsLaunch& p, const QueryTile& tile, int64_t head,
                           const Target<Kv>& to) {
  if (p.kv.key_codes == nullptr) return;
  const KvLayout& layout = p.kv.layout;
  const int64_t num_warps = blockDim.x / kWarpThreads;
  __syncthreads();  // a warp codes keys that all warps have written
  const std::byte* codes =
      p.kv.KeyCodes(tile.slot, tile.first_position / kPageTokens, p.layer, head);
  for (int64_t r = threadIdx.x / kWarpThreads; r < tile.num_rows; r += num_warps) {
    const Kv* const key = to.keys + r * layout.head_dim;
    EncodeKey(
        layout, [&](int64_t i) { return key[i]; }, TokenCodes(layout, codes, to.offset + r));
  }
}

// Extends the page's bounds by those of each warp's keys, an element a thread. Warps are in the
// order of their tokens: among equal elements (0 and -0) the first is kept. NaN changes nothing.
template <int kWarps, int kWidth>
__device__ void MergeBounds(const BFloat16 (&least)[kWarps][kWidth],
                            const BFloat16 (&greatest)[kWarps][kWidth], int64_t head_dim,
                            bool opens_page, BFloat16* bounds) {
  const int i = static_cast<int>(threadIdx.x);
  if (i >= head_dim) return;
  BFloat16 low(INFINITY), high(-INFINITY);
  if (!opens_page) {
    low = bounds[i];
    high = bounds[head_dim + i];
  }
  for (int warp = 0; warp < kWarps; ++warp) {
    const BFloat16 own_low = least[warp][i], own_high = greatest[warp][i];
    if (static_cast<float>(own_low) < static_cast<float>(low)) low = own_low;
    if (static_cast<float>(own_high) > static_cast<float>(high)) high = own_high;
  }
  bounds[i] = low;
  bounds[head_dim + i] = high;
}

__device__ bool SharePage(const QueryTile& a, const QueryTile& b) {
  return a.slot == b.slot && a.first_position / kPageTokens == b.first_position / kPageTokens;
}

// Calls append(tile) for all tiles of the page, in order, if `first` is the page's first tile.
// Called by all threads of the CTA.
template <typename Append>
__device__ void ForTilesOfPage(const AppendHeadsLaunch& p, int64_t first, int64_t head,
                               const Append& append) {
  const QueryTile tile = p.tiles[first];
  bool is_first = true;
  bool is_alone = true;
  for (int64_t j = threadIdx.x; j < p.num_tiles; j += blockDim.x) {
    if (j == first || !SharePage(p.tiles[j], tile)) continue;
    (j < first ? is_first : is_alone) = false;
  }
  if (__syncthreads_and(is_first) == 0) return;
  const bool alone = __syncthreads_and(is_alone) != 0;
  const PageRef page = p.kv.Peek(tile.slot, tile.first_position / kPageTokens, p.layer, head);
  if (page.tier() != PageTier::kDevice) {
    if (threadIdx.x == 0) p.faults[tile.slot] = 1;
    return;
  }
  const int64_t end = alone ? first + 1 : p.num_tiles;
  for (int64_t j = first; j < end; ++j) {
    const QueryTile next = p.tiles[j];
    if (SharePage(next, tile)) append(next);
  }
}

}  // namespace
}  // namespace kvasir::kernels
