// One page of decode attention, by a warpgroup: one query a row, up to 8 heads of a KV group
// together. For a page of 64 tokens it computes
//
//   S[64 tokens, 8 heads] = K[64, d] q^T            M = tokens: only the heads, up to 8, are
//   P = exp2(scale S - max)                         padded
//   O[d, 8 heads] += V^T[d, 64] P                   M = head dimension
//
// and keeps (max, sum, O) of its pages. For the kernels of decode attention.
#pragma once

#include "kernels/attention/attend_launch.h"
#include "kernels/attention/code_products.cuh"
#include "kernels/attention/page_pipeline.cuh"

namespace kvasir::kernels {

constexpr int kHeads = static_cast<int>(kMaxDecodeHeads);  // columns of the products

// Working memory of a warpgroup.
template <int kHeadDim>
struct alignas(1024) DecodeMemory {
  std::byte query[PageShape<kHeadDim>::kHalves * hopper::kSwizzledGroupBytes];  // [8 heads][64]
                                                                                // halves
  std::byte weights[hopper::kSwizzledGroupBytes];  // P: [8 heads][64 tokens]
};
// Exchange between the warps of a warpgroup.
using WarpExchange = float[4][kHeads];

// A thread's part of a warpgroup's state: two heads (columns), and the rows of O that wgmma gives
// it.
template <int kHeadDim>
struct ThreadState {
  float max[2] = {kMinusInfinity, kMinusInfinity};  // of the scaled logits, times log2(e)
  float sum[2] = {0, 0};                            // over this thread's tokens only
  float out[PageShape<kHeadDim>::kHalves][4] = {};
};

// Query heads of a group.
struct HeadRange {
  int begin = 0;
  int end = 0;

  __device__ int size() const { return end - begin; }
};

// Loads the queries of some heads of selection row `row`, whose tile begins at row `first_row` of
// q. Rows of absent heads are zero. `kForCodes`: keys stay codes.
template <int kHeadDim, Placement kPlacement, bool kForCodes = false>
__device__ void LoadQuery(const AttendLaunch& p, int64_t row, int64_t first_row,
                          const HeadRange& of_group, const ThreadPlace& me, std::byte* to) {
  const int64_t kv_head = row % p.kv.layout.num_kv_heads;
  const int64_t heads = p.kv.layout.num_kv_heads * p.group;
  const __nv_bfloat16* first =
      p.q + (first_row * heads + kv_head * p.group + of_group.begin) * kHeadDim;
  const auto query_of = [&](int head) {
    return head < of_group.size() ? first + head * kHeadDim : nullptr;
  };
  if constexpr (kForCodes) {
    static_assert(kPlacement == Placement::kCached);
    LoadQueryForCodes<kHeadDim, kHeads>(me, query_of, to);
    return;
  }
  LoadQueryTile<kHeadDim, kHeads>(me, query_of, to);
  if constexpr (kPlacement != Placement::kCached) {
    const int64_t own = p.tiles[row / p.kv.layout.num_kv_heads].first_position;
    const int64_t position = kPlacement == Placement::kGrouped ? p.grouped.FarQuery(own)
                                                               : QueryPosition(p.headers[row], own);
    RotateTile<kHeadDim, kHeads>(
        p.rope, me.thread, kGroupThreads, [&](int) { return position; }, to);
    Synchronize(me);
  }
}

template <int kHeadDim>
__device__ void Logits(const std::byte* keys, const std::byte* query, float (&s)[4]) {
  using Shape = PageShape<kHeadDim>;
  hopper::WgmmaFence();
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    const int half = step / 4;
    const int offset = step % 4 * 32;  // 16 values
    hopper::Wgmma64x8<hopper::Major::kK>(
        s, hopper::Advance(hopper::TileDescriptor(keys + half * Shape::kBoxBytes), offset),
        hopper::Advance(hopper::TileDescriptor(query + half * hopper::kSwizzledGroupBytes), offset),
        step > 0);
  }
  hopper::WgmmaCommit();
  hopper::WgmmaWait<0>();
}

// Writes the maximum of each of the thread's two columns over all 64 rows to `max`.
__device__ inline void ColumnMax(const ThreadPlace& me, float (*warp_max)[kHeads],
                                 const float (&s)[4], float (&max)[2]) {
  for (int j = 0; j < 2; ++j) {
    float value = fmaxf(s[j], s[j + 2]);
    for (int distance = 4; distance < kWarpThreads; distance *= 2) {
      value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, distance));
    }
    max[j] = value;
  }
  if (me.thread % kWarpThreads < 4) {
    warp_max[me.warp][me.column] = max[0];
    warp_max[me.warp][me.column + 1] = max[1];
  }
  Synchronize(me);
  for (int j = 0; j < 2; ++j) {
    for (int warp = 0; warp < 4; ++warp) max[j] = fmaxf(max[j], warp_max[warp][me.column + j]);
  }
}

template <int kHeadDim>
__device__ void AddValues(const std::byte* values, const std::byte* weights,
                          float (&out)[PageShape<kHeadDim>::kHalves][4]) {
  using Shape = PageShape<kHeadDim>;
  hopper::WgmmaFence();
#pragma unroll
  for (int half = 0; half < Shape::kHalves; ++half) {
#pragma unroll
    for (int step = 0; step < static_cast<int>(kPageTokens) / 16; ++step) {
      hopper::Wgmma64x8<hopper::Major::kMN>(
          out[half],
          hopper::Advance(hopper::TileDescriptor(values + half * Shape::kBoxBytes),
                          step * 16 * hopper::kSwizzledRowBytes),
          hopper::Advance(hopper::TileDescriptor(weights), step * 32), true);
    }
  }
  hopper::WgmmaCommit();
  hopper::WgmmaWait<0>();
}

// Scale of a key (side 0) or value (side 1) in a row of the stage; 1 where the KV is not quantized.
template <typename Ring>
__device__ float RowScale(const Ring& ring, int stage, int side, int row) {
  if constexpr (Ring::kCoded) return CodeScale(ring.ScaleOf(stage, side, row)).factor();
  return 1;
}

// Logits of the stage's tokens, without the scales of quantized keys.
template <int kHeadDim, typename Ring>
__device__ void StageLogits(Ring& ring, int stage, DType dtype, const std::byte* query,
                            const ThreadPlace& me, float (&s)[4]) {
  if constexpr (!Ring::kKeepsCodes) {
    Logits<kHeadDim>(ring.keys(stage), query, s);
  } else if (dtype == DType::kInt8) {
    CodedLogits<kHeadDim, true>(ring.codes(stage), query, me, s);
  } else {
    CodedLogits<kHeadDim, false>(ring.codes(stage), query, me, s);
  }
}

// Adds the stage's values, without their scales.
template <int kHeadDim, typename Ring>
__device__ void AddStageValues(Ring& ring, int stage, DType dtype, const std::byte* weights,
                               const ThreadPlace& me,
                               float (&out)[PageShape<kHeadDim>::kHalves][4]) {
  if constexpr (!Ring::kKeepsCodes) {
    AddValues<kHeadDim>(ring.values(stage), weights, out);
    return;
  }
  const std::byte* const codes = ring.codes(stage) + CodePage<kHeadDim>::kSideBytes;
  if (dtype == DType::kInt8) {
    AddCodedValues<kHeadDim, true>(codes, weights, me, out);
  } else {
    AddCodedValues<kHeadDim, false>(codes, weights, me, out);
  }
}

// Adds the stage's page. Only this warpgroup reads the stage, which it may change.
template <int kHeadDim, Placement kPlacement, typename Ring>
__device__ void AttendToPage(const AttendLaunch& p, Ring& ring, DecodeMemory<kHeadDim>& mine,
                             WarpExchange& exchange, const ThreadPlace& me, int stage,
                             ThreadState<kHeadDim>& state) {
  const uint64_t mask = ring.masks[stage];
  if (mask == 0) return;
  if constexpr (Ring::kCoded && !Ring::kKeepsCodes) {
    DecodeStage<kGroupThreads, Decoding::kUnscaled>(ring, stage, p.kv.layout.dtype, me.thread,
                                                    [&] { Synchronize(me); });
    Synchronize(me);
  }
  if constexpr (kPlacement != Placement::kCached) {
    RotateKeys(ring, stage, p.rope, me.thread, kGroupThreads);
    Synchronize(me);
  }
  float s[4] = {};
  StageLogits<kHeadDim>(ring, stage, p.kv.layout.dtype, mine.query, me, s);
  const bool attended[2] = {(mask >> me.row & 1) != 0, (mask >> (me.row + 8) & 1) != 0};
  for (int i = 0; i < 4; ++i) {
    const float scale = RowScale(ring, stage, 0, me.row + i / 2 * 8);
    s[i] = attended[i / 2] ? s[i] * scale * p.scale * kLog2E : kMinusInfinity;
  }
  float page_max[2];
  ColumnMax(me, exchange, s, page_max);
  if (!Ring::kCoded && mask != ~uint64_t{0})
    ZeroMaskedValues(ring, stage, mask, me.thread, kGroupThreads);
  float offset[2];  // base of the exponent: a maximum, or 0 while there is no key
  for (int j = 0; j < 2; ++j) {
    const float max = fmaxf(state.max[j], page_max[j]);
    offset[j] = max == kMinusInfinity ? 0.0f : max;
    const float fade = exp2f(state.max[j] - offset[j]);
    state.max[j] = max;
    state.sum[j] *= fade;
    for (int half = 0; half < PageShape<kHeadDim>::kHalves; ++half) {
      state.out[half][j] *= fade;
      state.out[half][j + 2] *= fade;
    }
  }
  for (int i = 0; i < 4; ++i) {
    const int j = i % 2;
    const float weight = exp2f(s[i] - offset[j]);
    state.sum[j] += weight;
    const int token = me.row + i / 2 * 8;
    *reinterpret_cast<__nv_bfloat16*>(mine.weights +
                                      hopper::SwizzledOffset(me.column + j, token * 2)) =
        __float2bfloat16_rn(attended[i / 2] ? weight * RowScale(ring, stage, 1, token) : 0.0f);
  }
  hopper::FenceAsyncProxy();
  Synchronize(me);
  AddStageValues<kHeadDim>(ring, stage, p.kv.layout.dtype, mine.weights, me, state.out);
}

}  // namespace kvasir::kernels
