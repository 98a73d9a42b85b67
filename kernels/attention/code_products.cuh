// Products of decode attention with pages of quantized KV (kernels/paged/kv_codes.h), for
// decode_page.cuh. A thread of the warpgroup loads the codes of its own part of an operand and
// decodes them in registers, where wgmma takes them: nothing is written back to shared memory. What
// a product sums over, and its rows, may come in any order, as long as the other operand, or who
// reads the sums, has the same one. So a thread has neighbouring codes:
//
//   S = K q^T      a step's 16 columns are four neighbouring dims of each quarter of the head
//   O += V^T P     a thread's rows, of all tiles, are kHeadDim / 32 neighbouring dims
//
// Codes are decoded without their tokens' scales, so all are finite.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cuda_bf16.h>
#include <type_traits>

#include "kernels/attention/page_pipeline.cuh"
#include "kernels/base/wgmma/wgmma.cuh"
#include "kernels/paged/kv_codes.cuh"

namespace kvasir::kernels {

// Loads queries like LoadQueryTile, with the columns in the order of CodedLogits.
template <int kHeadDim, int kRows, typename QueryOf>
__device__ void LoadQueryForCodes(const ThreadPlace& me, const QueryOf& query_of, std::byte* to) {
  constexpr int kPairs = kHeadDim / 2;
  constexpr int kQuarter = kHeadDim / 4;
  constexpr int kTileColumns = static_cast<int>(kBoxColumns);
#pragma unroll 1
  for (int i = me.thread; i < kRows * kPairs; i += kGroupThreads) {
    const int row = i / kPairs;
    const int dim = i % kPairs * 2;
    const int in_quarter = dim % kQuarter;
    const int column = in_quarter / 4 * 16 + in_quarter % 4 / 2 * 8 + dim / kQuarter * 2;
    uint32_t pair = 0;
    if (const __nv_bfloat16* query = query_of(row); query != nullptr) {
      pair = *reinterpret_cast<const uint32_t*>(query + dim);
    }
    *reinterpret_cast<uint32_t*>(to + column / kTileColumns * kRows * hopper::kSwizzledRowBytes +
                                 hopper::SwizzledOffset(row, column % kTileColumns * 2)) = pair;
  }
  hopper::FenceAsyncProxy();
  Synchronize(me);
}

// s[64 tokens, 8 heads] = K q^T, with the query of LoadQueryForCodes.
template <int kHeadDim, bool kIsInt8>
__device__ void CodedLogits(const std::byte* keys, const std::byte* query, const ThreadPlace& me,
                            float (&s)[4]) {
  constexpr int kParts = kHeadDim / 64;  // of 16 codes, a step's four for each of 4 steps
  int offset = me.row * kHeadDim + me.column / 2 * (kHeadDim / 4);
  // Without this the places of all parts would be kept between pages, in more registers than there
  // are.
  asm volatile("" : "+r"(offset));
  // Odd tokens load their second part first: so eight neighbours use all banks.
  const bool swaps = kParts == 2 && me.row % 2 != 0;
  uint4 words[kParts][2];  // of the thread's two tokens
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const auto* const from = reinterpret_cast<const uint4*>(keys + offset + 8 * i * kHeadDim);
    if constexpr (kParts == 1) {
      words[0][i] = from[0];
    } else {
      const uint4 first = from[swaps ? 1 : 0];
      const uint4 second = from[swaps ? 0 : 1];
      words[0][i] = swaps ? second : first;
      words[1][i] = swaps ? first : second;
    }
  }
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const uint4(&of)[2] = words[part];
    const uint32_t four[4][2] = {
        {of[0].x, of[1].x}, {of[0].y, of[1].y}, {of[0].z, of[1].z}, {of[0].w, of[1].w}};
    uint32_t a[4][4];
#pragma unroll
    for (int step = 0; step < 4; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[step][i] = DecodePair<kIsInt8>(four[step][i % 2], i >= 2);
    }
    hopper::WgmmaFence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const std::byte* const columns = query + part * hopper::kSwizzledGroupBytes;
      hopper::Wgmma64x8(s, a[step], hopper::Advance(hopper::TileDescriptor(columns), step * 32));
    }
    hopper::WgmmaCommit();
    hopper::WgmmaWait<0>();
  }
}

// Returns the dim of the sums out[half][j] (`row` 0) and out[half][j + 2] (1) of AddCodedValues.
template <int kHeadDim>
__device__ int DimOfSum(const ThreadPlace& me, int half, int row) {
  return (me.warp * 8 + me.row % 8) * (kHeadDim / kWarpThreads) + 2 * half + row;
}

// out[d, 8 heads] += V^T[d, 64] P, in the order of DimOfSum.
template <int kHeadDim, bool kIsInt8>
__device__ void AddCodedValues(const std::byte* values, const std::byte* weights,
                               const ThreadPlace& me,
                               float (&out)[PageShape<kHeadDim>::kHalves][4]) {
  constexpr int kSteps = 2;  // of 16 tokens, at once: there are no registers for more
  constexpr int kHalves = PageShape<kHeadDim>::kHalves;
  using Word = std::conditional_t<kHalves == 2, uint32_t, uint16_t>;
  int offset = me.column * kHeadDim + DimOfSum<kHeadDim>(me, 0, 0);
  asm volatile("" : "+r"(offset));  // as in CodedLogits
  const std::byte* const from = values + offset;
#pragma unroll
  for (int first = 0; first < static_cast<int>(kPageTokens) / 16; first += kSteps) {
    uint32_t words[kSteps][4];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = (first + step) * 16 + i % 2 + i / 2 * 8;
        words[step][i] = *reinterpret_cast<const Word*>(from + token * kHeadDim);
      }
    }
    uint32_t a[kSteps][kHalves][4];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int tokens = i / 2 * 2;
          a[step][half][i] =
              DecodeAcross<kIsInt8>(words[step][tokens], words[step][tokens + 1], 2 * half + i % 2);
        }
      }
    }
    hopper::WgmmaFence();
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        hopper::Wgmma64x8(out[half], a[step][half],
                          hopper::Advance(hopper::TileDescriptor(weights), (first + step) * 32));
      }
    }
    hopper::WgmmaCommit();
    hopper::WgmmaWait<0>();
  }
}

}  // namespace kvasir::kernels
