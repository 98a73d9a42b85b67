// Internal to attend_tile_simd.h, whose first lines say how these parts are compiled: a step of the
// online softmax over the logits of a page.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/attention/tile/attend_tile.h"
#include "kernels/attention/tile/attend_tile_keys_simd.h"
#include "kernels/simd/simd_units.h"

namespace kvasir::kernels {
namespace {

constexpr float kMinusInfinity = -__builtin_inff();
constexpr int kTokenVectors = static_cast<int>(kTileTokens / kSimdWidth);

// exp(x) for x <= 0, at most 2 ulp off: exp(0) = 1 exactly, exp(-inf) = 0, NaN stays NaN, and 0
// below -104. x = n ln 2 + r, with a polynomial of degree 6 in r whose first two coefficients are
// exact (minimax, relative error 3e-9).
inline Vec ExpOfNegative(Vec x) {
  x = LargerOrSecond(Broadcast(-105.0f), x);
  const Vec n = RoundToInteger(x * Broadcast(0x1.715476p+0f));
  Vec r = Fma(n, Broadcast(-0x1.62e4p-1f), x);
  r = Fma(n, Broadcast(-0x1.7f7d1cp-20f), r);
  Vec p = Broadcast(0x1.6a2434p-10f);
  p = Fma(p, r, Broadcast(0x1.1239e2p-7f));
  p = Fma(p, r, Broadcast(0x1.5558f2p-5f));
  p = Fma(p, r, Broadcast(0x1.555492p-3f));
  p = Fma(p, r, Broadcast(0x1.fffffcp-2f));
  p = Fma(p, r, Broadcast(1.0f));
  p = Fma(p, r, Broadcast(1.0f));
  return ScaleByPowerOfTwo(p, n);
}

// Scales and masks the logits (-inf where masked). Returns the largest of them and `max`.
inline float ScaleAndMask(const TileShape& shape, uint64_t mask, float max, float* logits) {
  const Vec scale = Broadcast(shape.scale);
  const Vec masked = Broadcast(kMinusInfinity);
  Vec largest = Broadcast(max);
#pragma GCC unroll 16
  for (int j = 0; j < kTokenVectors; ++j) {
    const auto bits = static_cast<uint32_t>(mask >> (j * kSimdWidth) & ((1u << kSimdWidth) - 1));
    const Vec scaled = KeepWhere(bits, Load(logits + j * kSimdWidth) * scale, masked);
    largest = LargerOrSecond(scaled, largest);  // a NaN is dropped here and shows in the sum
    Store(logits + j * kSimdWidth, scaled);
  }
  return LargestElement(largest);
}

// Replaces the logits by the weights exp(logit - max), and adds these to the sums by lanes.
inline void TakeWeights(float max, float rescale, float* logits, float* sums) {
  const Vec subtracted = Broadcast(max);
  Vec p[kTokenVectors];
#pragma GCC unroll 16
  for (int j = 0; j < kTokenVectors; ++j) {
    p[j] = ExpOfNegative(Load(logits + j * kSimdWidth) - subtracted);
    Store(logits + j * kSimdWidth, p[j]);
  }
#pragma GCC unroll 4
  for (int lane = 0; lane < kLaneVectors; ++lane) {
    const Vec sum = (p[lane] + p[kLaneVectors + lane]) +
                    (p[2 * kLaneVectors + lane] + p[3 * kLaneVectors + lane]);
    float* const to = sums + lane * kSimdWidth;
    Store(to, Fma(Load(to), Broadcast(rescale), sum));
  }
}

// One step of the online softmax: the rows' logits become weights, as units. Updates max and sums,
// and writes the factors for `out` to `rescale`.
template <typename Tile, int kRows>
inline void SoftmaxStep(const TileShape& shape, const RowBlock& block, std::byte* weights,
                        float rescale[kTileLanes]) {
  alignas(64) float change[kTileLanes] = {};
  float new_max[static_cast<size_t>(kRows)];
  const auto logits = [&](int r) { return reinterpret_cast<float*>(weights + r * kTokenRowBytes); };
  for (int r = 0; r < kRows; ++r) {
    const float largest = ScaleAndMask(shape, block.mask, block.max[r], logits(r));
    new_max[r] = largest == kMinusInfinity ? 0 : largest;  // only -inf and NaN so far
    change[r] = block.max[r] - new_max[r];
    block.max[r] = largest;
  }
  for (int64_t lane = 0; lane < kRows; lane += kSimdWidth) {
    Store(rescale + lane, ExpOfNegative(Load(change + lane)));
  }
  for (int r = 0; r < kRows; ++r) {
    TakeWeights(new_max[r], rescale[r], logits(r), block.sums + r * kTileLanes);
    Tile::StoreWeights(logits(r), weights + r * kTokenRowBytes);
  }
}

}  // namespace
}  // namespace kvasir::kernels
