// The softmax of prefill attention (attend_prefill.cu), between two products of a warpgroup: from
// the logits of 64 queries and a page of 64 keys in registers to weights in registers.
#pragma once

#include "kernels/attention/page_pipeline.cuh"

namespace kvasir::kernels {

inline constexpr int kQueries = static_cast<int>(kPageTokens);  // rows of the products
inline constexpr int kElements = 32;                            // of a thread, in a 64 x 64 tile

// Row and column of a thread's element of a tile, relative to the thread's place.
__device__ constexpr int RowOf(int element) { return element / 2 % 2; }  // times 8
__device__ constexpr int ColumnOf(int element) { return element / 4 * 8 + element % 2; }

// State of the two rows of which a thread has a part. A row's weights are 2 to the power of its
// logits, scaled and times log2(e), less its offset. The offset is the row's maximum at some
// earlier page: it follows the maximum only where logits grow more than kLargestWeight beyond it.
// Each row decides that by its own logits.
template <int kHeadDim>
struct ThreadState {
  float offset[2] = {0, 0};
  float limit[2] = {kMinusInfinity, kMinusInfinity};  // of logits less the offset
  float fade[2];                                      // of the last change of offsets
  float sum[2] = {0, 0};                              // of this thread's columns only
  float out[kHeadDim / 2] = {};
};
inline constexpr float kLargestWeight = 8;  // log2: bfloat16 has as many digits there as below 1

// Masks tokens outside the mask, and those that a query does not see: row r of the product sees the
// page's tokens up to number `last` + r.
__device__ __forceinline__ void Mask(uint64_t mask, int last, const ThreadPlace& me,
                                     float (&s)[kElements]) {
  mask >>= me.column;
  last += me.row - me.column;
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    const bool is_seen = ColumnOf(i) <= last + 8 * RowOf(i);
    if ((mask >> ColumnOf(i) & 1) == 0 || !is_seen) s[i] = kMinusInfinity;
  }
}

// Masks the tokens up to number `last` + r in row r: far ones, or those before a window.
__device__ __forceinline__ void MaskUpTo(int last, const ThreadPlace& me, float (&s)[kElements]) {
  last += me.row - me.column;
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    if (ColumnOf(i) <= last + 8 * RowOf(i)) s[i] = kMinusInfinity;
  }
}

__device__ __forceinline__ uint32_t Pack(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Weights of a thread's rows, in the form of the products.
struct RowWeights {
  uint32_t parts[kQueries / 16][4];
};

// Sums of a thread's columns, two for each row, added in parallel.
struct RowSums {
  float halves[2][2] = {};
  __device__ float of(int row) const { return halves[row][0] + halves[row][1]; }
};

// Turns logits less their offsets into weights, and returns the sums of these.
__device__ __forceinline__ RowSums Weigh(const float (&s)[kElements], RowWeights& weights) {
  RowSums sums;
#pragma unroll
  for (int i = 0; i < kElements / 2; ++i) {
    const float x = hopper::Exp2(s[2 * i]);
    const float y = hopper::Exp2(s[2 * i + 1]);
    sums.halves[RowOf(2 * i)][0] += x;
    sums.halves[RowOf(2 * i)][1] += y;
    weights.parts[i / 4][i % 4] = Pack(x, y);
  }
  return sums;
}

// Moves the offsets of rows whose logits passed their limits to the rows' maxima, and fades their
// sums. Sets the factors for their values.
template <int kHeadDim>
__device__ inline void Raise(float (&s)[kElements], float (&max)[2], ThreadState<kHeadDim>& state) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    max[i] = fmaxf(max[i], __shfl_xor_sync(kAllLanes, max[i], 1));
    max[i] = fmaxf(max[i], __shfl_xor_sync(kAllLanes, max[i], 2));
    const bool is_first = state.limit[i] == kMinusInfinity;
    const float by = max[i] > state.limit[i] ? max[i] : 0.0f;
    if (max[i] > state.limit[i]) state.limit[i] = kLargestWeight;
    state.offset[i] += by;
    state.fade[i] = is_first ? 1.0f : hopper::Exp2(-by);
    state.sum[i] *= state.fade[i];
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      if (RowOf(e) == i) s[e] -= by;
    }
  }
}

// Turns logits into weights. Returns true if the offset of a row of the warp was raised. That is
// known after the exponentials, during which the maxima are found: it seldom is after the first
// pages, and then the weights are made again.
template <int kHeadDim>
__device__ bool SoftenRows(float scale, float (&s)[kElements], ThreadState<kHeadDim>& state,
                           RowWeights& weights) {
  float max[2][2] = {{kMinusInfinity, kMinusInfinity}, {kMinusInfinity, kMinusInfinity}};
#pragma unroll
  for (int e = 0; e < kElements; ++e) {
    s[e] = s[e] * scale - state.offset[RowOf(e)];
    max[RowOf(e)][e % 2] = fmaxf(max[RowOf(e)][e % 2], s[e]);
  }
  RowSums sums = Weigh(s, weights);
  // Otherwise the compiler would begin the exponentials after the decision.
#pragma unroll
  for (int i = 0; i < kElements / 2; ++i) asm volatile("" : "+r"(weights.parts[i / 4][i % 4]));
  float highest[2] = {fmaxf(max[0][0], max[0][1]), fmaxf(max[1][0], max[1][1])};
  const bool rises = highest[0] > state.limit[0] || highest[1] > state.limit[1];
  const bool any_rises = __any_sync(kAllLanes, rises) != 0;
  if (any_rises) {
    Raise(s, highest, state);
    sums = Weigh(s, weights);
  }
  state.sum[0] += sums.of(0);
  state.sum[1] += sums.of(1);
  return any_rises;
}

// Applies the factors of the last Raise.
template <int kHeadDim>
__device__ inline void Fade(ThreadState<kHeadDim>& state) {
#pragma unroll
  for (int e = 0; e < kHeadDim / 2; ++e) state.out[e] *= state.fade[RowOf(e)];
}

}  // namespace kvasir::kernels
