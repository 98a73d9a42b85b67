// Internal to append_heads.cu: appends to pages of quantized KV (kernels/paged/kv_codes.h). A warp
// codes a token. Then threads extend the bounds, each for one element, in the order of tokens.
#pragma once

#include "kernels/append/append_heads.cuh"
#include "kernels/paged/page_elements.cuh"

namespace kvasir::kernels {
namespace {

// In the place of the dtype of cached elements.
struct Codes {};

inline constexpr int64_t kCodingThreads = 256;  // at least one for each element of a head

// Codes a key or value by one warp; element i is at(i).
template <typename At>
__device__ void CodeToken(DType dtype, int64_t d, const At& at, std::byte* codes,
                          std::byte* scale) {
  const int64_t lane = threadIdx.x % kWarpThreads;
  float largest = 0;
  bool is_nan = false;
  for (int64_t i = lane; i < d; i += kWarpThreads) {
    const float magnitude = fabsf(at(i));
    largest = fmaxf(largest, magnitude);
    is_nan |= isnan(magnitude) != 0;
  }
  for (int distance = 1; distance < kWarpThreads; distance *= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, distance));
  }
  is_nan = __any_sync(kAllLanes, is_nan) != 0;
  const uint8_t power = is_nan ? kNanScale : ScaleOf(dtype, largest);
  if (lane == 0) *scale = std::byte{power};
  const float factor = power == kNanScale ? 0.0f : CodingFactor(power);
  for (int64_t i = lane; i < d; i += kWarpThreads) {
    const float x = at(i) * factor;
    const uint8_t code = dtype == DType::kInt8 ? EncodeInt8(x) : EncodeFloat8(x);
    codes[i] = std::byte{power == kNanScale ? uint8_t{0} : code};
  }
}

// Extends the page's bounds by the keys of the tokens [begin, end).
__device__ inline void ExtendBounds(const CodedKeys& keys, int64_t d, int64_t begin, int64_t end,
                                    BFloat16* bounds) {
  const int64_t i = threadIdx.x;
  if (i >= d) return;
  BFloat16 min = begin == 0 ? BFloat16(INFINITY) : bounds[i];
  BFloat16 max = begin == 0 ? BFloat16(-INFINITY) : bounds[d + i];
  for (int64_t token = begin; token < end; ++token) {
    const BFloat16 key = keys.At(token, i);
    // Comparisons with NaN are false: a NaN key changes nothing.
    min = static_cast<float>(key) < static_cast<float>(min) ? key : min;
    max = static_cast<float>(key) > static_cast<float>(max) ? key : max;
  }
  bounds[i] = min;
  bounds[d + i] = max;
}

// Appends one tile, by all threads of the CTA. REQUIRES: the page is in the device tier.
template <typename Activation>
__device__ void AppendCodes(const AppendHeadsLaunch& p, const QueryTile& tile, int64_t head) {
  const KvLayout& layout = p.kv.layout;
  const int64_t d = layout.head_dim;
  const int64_t block = tile.first_position / kPageTokens;
  const int64_t begin = tile.first_position % kPageTokens;
  const int64_t end = begin + tile.num_rows;
  std::byte* const page = p.kv.Peek(tile.slot, block, p.layer, head).page();
  __shared__ float norm_scales[kPageTokens];
  FindScales<Activation>(p, tile, head, norm_scales);
  const int64_t warp = threadIdx.x / kWarpThreads;
  const int64_t warps = blockDim.x / kWarpThreads;
  for (int64_t place = begin + warp; place < end; place += warps) {
    const int64_t r = place - begin;
    const auto* k = HeadOf<Activation>(p, tile.first_row + r, p.num_heads + head);
    const auto* v = k + layout.num_kv_heads * d;
    const Head<Activation> key =
        MakeHead(p, tile.first_row + r, k, p.k_norm, p.k_norm == nullptr ? 1.0f : norm_scales[r]);
    std::byte* const scale = page + layout.scales_offset() + place;
    CodeToken(
        layout.dtype, d, [&](int64_t i) { return static_cast<float>(key.At(i)); }, page + place * d,
        scale);
    CodeToken(
        layout.dtype, d, [&](int64_t i) { return static_cast<float>(v[i]); },
        page + layout.v_offset() + place * d, scale + kPageTokens);
  }
  __syncthreads();  // digests read keys that all warps have written
  const CodedKeys keys(layout, page);
  if (p.kv.bounds != nullptr) {
    ExtendBounds(keys, d, begin, end,
                 reinterpret_cast<BFloat16*>(p.kv.Bounds(tile.slot, block, p.layer, head)));
  }
  if (p.kv.key_codes == nullptr) return;
  const std::byte* codes = p.kv.KeyCodes(tile.slot, block, p.layer, head);
  for (int64_t place = begin + warp; place < end; place += warps) {
    EncodeKey(
        layout, [&](int64_t i) { return keys.At(place, i); }, TokenCodes(layout, codes, place));
  }
}

}  // namespace
}  // namespace kvasir::kernels
