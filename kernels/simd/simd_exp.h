// The exponential over vectors, for files that include their simd_*.h before this header.
#pragma once

namespace kvasir::kernels {
namespace {

// Returns exp(x) within 2 units in the last place: exp(-88) (6e-39) below -88, +inf above 88.8, NaN
// for NaN. x = n ln2 + r with |r| <= ln2 / 2, and exp(r) by its Taylor polynomial of degree 7,
// whose error there is below 6e-9. ln2 is split in two so that n ln2 is exact to twice the
// precision.
inline Vec Exp(Vec x) {
  x = Clamp(x, -88.0f, 89.0f);
  const Vec n = RoundToInteger(x * Broadcast(1.44269504f));
  Vec r = Fma(n, Broadcast(-0.693359375f), x);
  r = Fma(n, Broadcast(2.12194440e-4f), r);
  Vec p = Broadcast(1.0f / 5040);
  p = Fma(p, r, Broadcast(1.0f / 720));
  p = Fma(p, r, Broadcast(1.0f / 120));
  p = Fma(p, r, Broadcast(1.0f / 24));
  p = Fma(p, r, Broadcast(1.0f / 6));
  p = Fma(p, r, Broadcast(0.5f));
  p = Fma(p, r, Broadcast(1.0f));
  p = Fma(p, r, Broadcast(1.0f));
  return ScaleByPowerOfTwo(p, n);
}

}  // namespace
}  // namespace kvasir::kernels
