// Internal to append_heads.cu: appends to pages of quantized KV (kernels/paged/kv_codes.h). A warp
// codes a token's key or its value: one half of a CTA's warps has keys, the other one values, and
// each warp consecutive tokens of the tile. Bounds are merged in the order of tokens.
#pragma once

#include "kernels/append/append_heads.cuh"
#include "kernels/paged/page_elements.cuh"

namespace kvasir::kernels {
namespace {

// In the place of the dtype of cached elements.
struct Codes {};

inline constexpr int64_t kCodingThreads = 256;  // at least one for each element
inline constexpr int64_t kSideWarps = kCodingThreads / kWarpThreads / 2;

// A token's elements lane + 32 j, as a warp's lanes hold them. `kCount` is enough for a head.
template <int kCount>
using LaneElements = float[kCount];
inline constexpr int kMostLaneElements = kCodingThreads / kWarpThreads;

// Takes a key or value by one warp; element i is at(i).
template <int kCount, typename At>
__device__ void TakeToken(int64_t d, const At& at, LaneElements<kCount>& elements) {
  const int64_t lane = threadIdx.x % kWarpThreads;
#pragma unroll
  for (int64_t j = 0; j < kCount; ++j) {
    const int64_t i = lane + j * kWarpThreads;
    elements[j] = i < d ? at(i) : 0.0f;
  }
}

// Codes a key or value by one warp. Returns its scale, and leaves the codes that the lane wrote.
template <int kCount>
__device__ std::byte CodeToken(DType dtype, int64_t d, const LaneElements<kCount>& elements,
                               std::byte* to, std::byte (&codes)[kCount]) {
  float largest = 0;
  bool is_nan = false;
#pragma unroll
  for (int64_t j = 0; j < kCount; ++j) {
    const float magnitude = fabsf(elements[j]);
    largest = fmaxf(largest, magnitude);
    is_nan |= isnan(magnitude) != 0;
  }
  for (int distance = 1; distance < kWarpThreads; distance *= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, distance));
  }
  is_nan = __any_sync(kAllLanes, is_nan) != 0;
  const uint8_t scale = is_nan ? kNanScale : ScaleOf(dtype, largest);
  const float factor = scale == kNanScale ? 0.0f : CodingFactor(scale);
#pragma unroll
  for (int64_t j = 0; j < kCount; ++j) {
    const int64_t i = threadIdx.x % kWarpThreads + j * kWarpThreads;
    const float x = elements[j] * factor;
    const uint8_t code = dtype == DType::kInt8 ? EncodeInt8(x) : EncodeFloat8(x);
    codes[j] = std::byte{scale == kNanScale ? uint8_t{0} : code};
    if (i < d) to[i] = codes[j];
  }
  return std::byte{scale};
}

// Least and greatest of keys, of each element. Among equal ones (0 and -0) the first is kept.
template <int kCount>
struct CodedBounds {
  LaneElements<kCount> least, greatest;

  __device__ CodedBounds() {
#pragma unroll
    for (int64_t j = 0; j < kCount; ++j) {
      least[j] = INFINITY;
      greatest[j] = -INFINITY;
    }
  }
  // NaN changes nothing: comparisons with it are false.
  __device__ void Add(DType dtype, const std::byte (&codes)[kCount], std::byte scale) {
#pragma unroll
    for (int64_t j = 0; j < kCount; ++j) {
      const auto key = static_cast<float>(DecodedElement(dtype, codes[j], scale));
      least[j] = key < least[j] ? key : least[j];
      greatest[j] = key > greatest[j] ? key : greatest[j];
    }
  }
};

// Memory in which the warps of a CTA exchange scales and bounds.
template <int kCount>
struct CodingMemory {
  float norm_scales[kPageTokens];
  BFloat16 least[kSideWarps][kCount * kWarpThreads];  // of each warp's keys
  BFloat16 greatest[kSideWarps][kCount * kWarpThreads];

  __device__ void Keep(const CodedBounds<kCount>& bounds, int64_t d) {
    const int64_t warp = threadIdx.x / kWarpThreads;
#pragma unroll
    for (int64_t j = 0; j < kCount; ++j) {
      const int64_t i = threadIdx.x % kWarpThreads + j * kWarpThreads;
      if (i >= d) continue;
      least[warp][i] = BFloat16(bounds.least[j]);
      greatest[warp][i] = BFloat16(bounds.greatest[j]);
    }
  }
};

// Codes the warp's share of the tile: keys, or values. The next token is read while one is coded.
template <typename Activation, int kCount>
__device__ void CodeSide(const AppendHeadsLaunch& p, const QueryTile& tile, int64_t head,
                         std::byte* page, CodingMemory<kCount>& memory) {
  const KvLayout& layout = p.kv.layout;
  const int64_t d = layout.head_dim;
  const int64_t warp = threadIdx.x / kWarpThreads % kSideWarps;
  const bool is_value = threadIdx.x / kWarpThreads >= kSideWarps;
  const int64_t share = (tile.num_rows + kSideWarps - 1) / kSideWarps;
  const int64_t end = min((warp + 1) * share, tile.num_rows);
  std::byte* const rows = page + (is_value ? layout.v_offset() : 0);
  std::byte* const scales = page + layout.scales_offset() + (is_value ? kPageTokens : 0);
  LaneElements<kCount> next;
  const auto take = [&](int64_t r) {
    const int64_t token = tile.first_row + r;
    if (is_value) {
      const auto* const v = HeadOf<Activation>(p, token, p.num_heads + layout.num_kv_heads + head);
      TakeToken(
          d, [&](int64_t i) { return static_cast<float>(v[i]); }, next);
    } else {
      const Head<Activation> key =
          MakeHead(p, token, HeadOf<Activation>(p, token, p.num_heads + head), p.k_norm,
                   p.k_norm == nullptr ? 1.0f : memory.norm_scales[r]);
      TakeToken(
          d, [&](int64_t i) { return static_cast<float>(key.At(i)); }, next);
    }
  };
  CodedBounds<kCount> bounds;
  if (warp * share < end) take(warp * share);
  for (int64_t r = warp * share; r < end; ++r) {
    LaneElements<kCount> elements;
#pragma unroll
    for (int64_t j = 0; j < kCount; ++j) elements[j] = next[j];
    if (r + 1 < end) take(r + 1);
    const int64_t place = tile.first_position % kPageTokens + r;
    std::byte codes[kCount];
    const std::byte scale = CodeToken(layout.dtype, d, elements, rows + place * d, codes);
    if (!is_value) bounds.Add(layout.dtype, codes, scale);
    if (threadIdx.x % kWarpThreads == 0) scales[place] = scale;
  }
  if (!is_value) memory.Keep(bounds, d);
}

// Appends one tile, by all threads of the CTA. REQUIRES: the page is in the device tier.
template <typename Activation, int kCount>
__device__ void AppendCodes(const AppendHeadsLaunch& p, const QueryTile& tile, int64_t head) {
  const KvLayout& layout = p.kv.layout;
  const int64_t block = tile.first_position / kPageTokens;
  const int64_t begin = tile.first_position % kPageTokens;
  std::byte* const page = p.kv.Peek(tile.slot, block, p.layer, head).page();
  using Memory = CodingMemory<kCount>;
  __shared__ alignas(alignof(Memory)) std::byte shared[sizeof(Memory)];
  auto& memory = *reinterpret_cast<Memory*>(shared);
  FindScales<Activation>(p, tile, head, memory.norm_scales);
  CodeSide<Activation, kCount>(p, tile, head, page, memory);
  __syncthreads();  // digests are made of what all warps have written
  if (p.kv.bounds != nullptr) {
    MergeBounds(memory.least, memory.greatest, layout.head_dim, begin == 0,
                reinterpret_cast<BFloat16*>(p.kv.Bounds(tile.slot, block, p.layer, head)));
  }
  if (p.kv.key_codes != nullptr) {
    const CodedKeys keys(layout, page);
    const std::byte* codes = p.kv.KeyCodes(tile.slot, block, p.layer, head);
    for (int64_t r = threadIdx.x / kWarpThreads; r < tile.num_rows;
         r += kCodingThreads / kWarpThreads) {
      EncodeKey(
          layout, [&](int64_t i) { return keys.At(begin + r, i); },
          TokenCodes(layout, codes, begin + r));
    }
  }
  __syncthreads();  // before shared memory is written again
}

}  // namespace
}  // namespace kvasir::kernels
