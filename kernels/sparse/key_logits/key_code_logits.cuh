// Logits of coded keys (kernels/append/key_codes.h) on the GPU, by the warp's matrix product. A
// warp takes 32 keys, tile after tile of eight queries. Codes are exact in bfloat16. Each query is
// two bfloat16 numbers, its rounded value and the rest, so logits are as exact as those of float
// sums. Keys are multiplied as they are coded, or decoded and rotated to positions of their own.
// For kernels of selectors and pruners.
//
//   a product   rows     eight queries, then the rests of the same
//               columns  eight keys
//               depth    16 elements, of which lane 4 g + t has four: of query g, and of key g
#pragma once

#include <bit>
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/append/key_code_math.h"
#include "kernels/base/ampere.cuh"
#include "kernels/sparse/common/select_row.cuh"

namespace kvasir::kernels {

inline constexpr int kProductQueries = 8;
inline constexpr int kProductKeys = 8;
inline constexpr int kKeyTiles = kWarpThreads / kProductKeys;  // of keys that a warp takes at once

// The elements of a lane: those of kLaneWords words of codes, adjacent in the first half of a head
// and in the second, so that a lane has both elements of a pair that is rotated. Step s of a
// product takes the first or the last four codes of its word s / 2.
template <int kHeadDim>
struct LaneElements {
  static constexpr int kWords = kHeadDim / static_cast<int>(kWordCodes);
  static constexpr int kLaneWords = kWords / 4;
  static constexpr int kHalfWords = kLaneWords / 2;  // of each half of the head
  static constexpr int kSteps = kHeadDim / 16;

  // The first word that lane 4 g + t has in a half of the head.
  __device__ static int FirstWord(int t, int half) { return half * (kWords / 2) + t * kHalfWords; }

  // The place of elements 4 i to 4 i + 3: lane 4 g + t, in a step.
  struct Place {
    int t;
    int step;
  };
  __device__ static Place PlaceOf(int i) {
    const int word = i / 2;
    const int in_half = word % (kWords / 2);
    const int lane_word = word / (kWords / 2) * kHalfWords + in_half % kHalfWords;
    return {.t = in_half / kHalfWords, .step = 2 * lane_word + i % 2};
  }
};

// Eight queries as operands, with the `sums` of their elements.
template <int kHeadDim>
struct alignas(16) StagedQueries {
  uint4 operands[LaneElements<kHeadDim>::kSteps][kWarpThreads];  // of a product, for each lane
  float sums[kProductQueries];
};

// Two floats as bfloat16, and the rests that bfloat16 loses. The first float is in the lower half.
struct SplitPair {
  __device__ SplitPair(float x, float y) {
    high = Rounded(x, y);
    low = Rounded(x - __uint_as_float(high << 16), y - __uint_as_float(high & 0xffff0000u));
  }
  __device__ static uint32_t Rounded(float x, float y) {
    const __nv_bfloat162 rounded = __floats2bfloat162_rn(x, y);
    return reinterpret_cast<const uint32_t&>(rounded);
  }
  uint32_t high;
  uint32_t low;
};

// Stores the queries [0, 8 num_tiles): four(query, i) returns their elements from 4 i on. By all
// threads of the CTA; the caller meets them before the tiles are used.
template <int kHeadDim, typename Four>
__device__ void StageQueries(StagedQueries<kHeadDim>* tiles, int num_tiles, const Four& four) {
  constexpr int kLanes = kHeadDim / 4;  // a query's
  const int num_items = num_tiles * kProductQueries * kLanes;
#pragma unroll 1
  for (int item = static_cast<int>(threadIdx.x); item < num_items;
       item += static_cast<int>(blockDim.x)) {
    const int query = item / kLanes;
    const int i = item % kLanes;
    const float4 own = four(query, i);
    StagedQueries<kHeadDim>& tile = tiles[query / kProductQueries];
    const int row = query % kProductQueries;
    const auto place = LaneElements<kHeadDim>::PlaceOf(i);
    const SplitPair first(own.x, own.y);
    const SplitPair second(own.z, own.w);
    tile.operands[place.step][4 * row + place.t] = {first.high, first.low, second.high, second.low};
    float sum = own.x + own.y + (own.z + own.w);
    for (int distance = kLanes / 2; distance > 0; distance /= 2) {
      sum += __shfl_xor_sync(kAllLanes, sum, distance);
    }
    if (i == 0) tile.sums[row] = sum;
  }
}

// Codes are multiplied as (code - kMiddleCode) / 16, so logits are sums of numbers of both signs,
// as exact as those of the keys. An element is then 16 scale times that number, plus `middle`.
inline constexpr float kMiddleCode = 7.5f;
struct CodeGrid {
  CodeGrid() = default;
  // `scale` and `zero` are the bits of float16 numbers.
  __device__ CodeGrid(uint32_t scale, uint32_t zero)
      : step(16 * FloatOf(scale)), middle(FloatOf(zero) + kMiddleCode * FloatOf(scale)) {}

  float step;
  float middle;

 private:
  __device__ static float FloatOf(uint32_t float16) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(float16)));
  }
};

// 32 keys of a warp in shared memory, as they lie in memory. A warp may request several times 32 at
// once.
template <int kHeadDim>
class StagedKeys {
 public:
  using Elements = LaneElements<kHeadDim>;

  // Begins to copy the keys; CommitCopies, WaitForCopies and Finish must follow. Each lane names
  // its key: `page` is the page's codes, `token` counts from its start. All logits of a lane
  // without a key (null) are NaN. By all lanes.
  __device__ void Begin(const KvLayout& layout, const std::byte* page, int token) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
    uint64_t own = 0;
    if (page != nullptr) {
      const TokenCodes codes(layout, page, token);
      own = reinterpret_cast<uint64_t>(codes.words);
      CopyAsync4(&grids_[lane].copied.x, codes.scale - token % 2);
      CopyAsync4(&grids_[lane].copied.y, codes.zero - token % 2);
    }
    halves_[lane] = page == nullptr ? kNone : token % 2;
    constexpr int kParts = kHeadDim / 32;  // of a key, 16 bytes each
#pragma unroll
    for (int pass = 0; pass < kParts; ++pass) {
      const int key = (pass * kWarpThreads + lane) / kParts;
      const auto* const from =
          reinterpret_cast<const uint4*>(__shfl_sync(kAllLanes, own, key)) + lane % kParts;
      CopyAsync16(&words_[key][lane % kParts * 4], from, reinterpret_cast<uint64_t>(from) >= 64);
    }
  }

  // Finishes the copy. By all lanes, which must meet afterwards.
  __device__ void Finish() {
    const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
    const int half = halves_[lane];
    const uint2 copied = grids_[lane].copied;
    grids_[lane].used = half == kNone ? CodeGrid(0, kFloat16NaN)
                                      : CodeGrid(copied.x >> (16 * half), copied.y >> (16 * half));
  }

  // Returns word i of lane 4 g + t, of key g of a tile.
  __device__ uint32_t word(int tile, int i) const {
    const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
    constexpr int kHalf = Elements::kHalfWords;
    return words_[tile * kProductKeys + lane / 4]
                 [Elements::FirstWord(lane % 4, i / kHalf) + i % kHalf];
  }
  __device__ const CodeGrid& GridOf(int key) const { return grids_[key].used; }

 private:
  static constexpr int kNone = 2;
  static constexpr uint32_t kFloat16NaN = 0x7e00;
  union Grid {
    uint2 copied;  // scale and zero, each with its neighbour
    CodeGrid used;
  };

  alignas(16) uint32_t words_[kWarpThreads][Elements::kWords];
  Grid grids_[kWarpThreads];
  int halves_[kWarpThreads];  // which of the two numbers is the key's; kNone: no key
};

// Codes (2 i, 2 i + 1) of a word as bfloat16 numbers.
__device__ inline uint32_t CodePair(uint32_t word, int i) {
  constexpr uint32_t kOnes = 0x3f803f80u;
  constexpr uint32_t kMiddles = 0x3fbc3fbcu;  // 1 + kMiddleCode / 16
  const uint32_t at_mantissa = i == 0 ? word << 3 : word >> (4 * i - 3);
  const uint32_t above = (at_mantissa & 0x00780078u) | kOnes;
  const __nv_bfloat162 code = __hsub2(reinterpret_cast<const __nv_bfloat162&>(above),
                                      reinterpret_cast<const __nv_bfloat162&>(kMiddles));
  return reinterpret_cast<const uint32_t&>(code);
}
// The centred code of element 8 w + i of word w, as CodeGrid multiplies it. Multiples of 2^-8 are
// the low bits of 2^15 + n.
__device__ inline float CentredCode(uint32_t word, int i) {
  const int nibble = i / 2 + i % 2 * 4;
  const uint32_t code = nibble == 0 ? word << 4 : word >> (4 * nibble - 4);
  return __uint_as_float((code & 0xf0u) | 0x47000000u) - (32768 + kMiddleCode / 16);
}

// The query operand of Mma16x8.
struct QueryOperand {
  uint32_t parts[4];
};

// Calls use(query_tile, key_tile, logits) for the queries of the tiles and kCount tiles of keys
// from `first` on. Lane 4 g + t gets the unscaled logits q . k~ of query g of the query tile with
// the keys 2 t and 2 t + 1 of the key tile. By all lanes.
template <int kCount = kKeyTiles, int kHeadDim, typename Use>
__device__ void ForEachLogit(const StagedKeys<kHeadDim>& keys, const StagedQueries<kHeadDim>* tiles,
                             int num_tiles, const Use& use, int first = 0) {
  constexpr int kSteps = LaneElements<kHeadDim>::kSteps;
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  uint32_t codes[kCount][kSteps][2];
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint32_t word = keys.word(first + k, step / 2);
      codes[k][step][0] = CodePair(word, step % 2 * 2);
      codes[k][step][1] = CodePair(word, step % 2 * 2 + 1);
    }
  }
#pragma unroll 1
  for (int tile = 0; tile < num_tiles; ++tile) {
    const float sum = tiles[tile].sums[lane / 4];
    float products[kCount][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const auto operand = std::bit_cast<QueryOperand>(tiles[tile].operands[step][lane]);
#pragma unroll
      for (int k = 0; k < kCount; ++k) Mma16x8(products[k], operand.parts, codes[k][step]);
    }
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const auto logit = [&](int i) {
        const CodeGrid grid = keys.GridOf((first + k) * kProductKeys + 2 * (lane % 4) + i);
        return grid.step * (products[k][i] + products[k][i + 2]) + grid.middle * sum;
      };
      use(tile, first + k, float2{logit(0), logit(1)});
    }
  }
}

// Eight keys, decoded and rotated, as operands.
template <int kHeadDim>
class PlacedKeys {
 public:
  using Elements = LaneElements<kHeadDim>;

  // Decodes the keys of one tile and rotates them. Each lane gives the rotation of key g. By all
  // lanes.
  __device__ PlacedKeys(const StagedKeys<kHeadDim>& keys, int tile, const RotationAt& at) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
    const CodeGrid grid = keys.GridOf(tile * kProductKeys + lane / 4);
    constexpr int kHalf = Elements::kHalfWords;
    constexpr int kCodes = static_cast<int>(kWordCodes);
#pragma unroll
    for (int w = 0; w < kHalf; ++w) {
      const uint32_t words[2] = {keys.word(tile, w), keys.word(tile, w + kHalf)};
      const int first = (Elements::FirstWord(lane % 4, 0) + w) * kCodes;
      float cos[kCodes];
      float sin[kCodes];
      LoadEight(at.cos + first, cos);
      LoadEight(at.sin + first, sin);
#pragma unroll
      for (int i = 0; i < kCodes; i += 2) {
        float turned[2][2];  // of the halves, of the pair
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float x = grid.step * CentredCode(words[0], i + e) + grid.middle;
          const float y = grid.step * CentredCode(words[1], i + e) + grid.middle;
          turned[0][e] = x * cos[i + e] - y * sin[i + e];
          turned[1][e] = y * cos[i + e] + x * sin[i + e];
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const SplitPair split(turned[half][0], turned[half][1]);
          high[2 * (half * kHalf + w) + i / 4][i / 2 % 2] = split.high;
          low[2 * (half * kHalf + w) + i / 4][i / 2 % 2] = split.low;
        }
      }
    }
  }

  uint32_t high[Elements::kSteps][2];
  uint32_t low[Elements::kSteps][2];

 private:
  static __device__ void LoadEight(const float* from, float (&to)[kWordCodes]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float4 four = __ldg(reinterpret_cast<const float4*>(from) + i);
      to[4 * i] = four.x;
      to[4 * i + 1] = four.y;
      to[4 * i + 2] = four.z;
      to[4 * i + 3] = four.w;
    }
  }
};

// The same for rotated keys: key i of the warp's is rotated to position_of(i), for all i.
template <int kCount = kKeyTiles, int kHeadDim, typename PositionOf, typename Use>
__device__ void ForEachPlacedLogit(const StagedKeys<kHeadDim>& keys,
                                   const DeviceRopePositions& rope, const PositionOf& position_of,
                                   const StagedQueries<kHeadDim>* tiles, int num_tiles, const Use& use,
                                   int first = 0) {
  constexpr int kSteps = LaneElements<kHeadDim>::kSteps;
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const RotationAt at(rope, kHeadDim / 2, position_of((first + k) * kProductKeys + lane / 4));
    const PlacedKeys<kHeadDim> placed(keys, first + k, at);
#pragma unroll 1
    for (int tile = 0; tile < num_tiles; ++tile) {
      float products[2][4] = {};
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const auto operand = std::bit_cast<QueryOperand>(tiles[tile].operands[step][lane]);
        Mma16x8(products[0], operand.parts, placed.high[step]);
        Mma16x8(products[1], operand.parts, placed.low[step]);
      }
      const auto logit = [&](int i) {
        return products[0][i] + products[0][i + 2] + (products[1][i] + products[1][i + 2]);
      };
      use(tile, first + k, float2{logit(0), logit(1)});
    }
  }
}

}  // namespace kvasir::kernels
