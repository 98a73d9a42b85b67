// The numbers of sampling, the same on every device: a token's share of probability as an integer,
// so that sums over a vocabulary do not depend on their order, and the effect of penalties on a
// logit. Internal to sampling. Nothing here may be fused to a multiply-add: host code is compiled
// without (CMakeLists.txt), and so is sampling.cu.
#pragma once

#include <bit>
#include <cfloat>
#include <cmath>
#include <cstdint>

#include "kernels/base/host_device.h"

namespace kvasir::kernels {

// Weight of the most probable token. Sums over kMaxVocab tokens stay below 2^63.
inline constexpr int kWeightBits = 40;
inline constexpr uint64_t kLargestWeight = uint64_t{1} << kWeightBits;
inline constexpr int64_t kMaxVocab = int64_t{1} << 22;

KVASIR_HOST_DEVICE inline float FloatOfBits(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  return std::bit_cast<float>(bits);
#endif
}

// Returns exp((logit - max) / temperature) in units of 2^-40, rounded down, within 1e-6 of its
// size. Tokens less probable than 2^-40 of the most probable one are never drawn. `max` >= logit is
// finite, logit may be -infinity, temperature > 0. exp(x) = 2^n exp(r) with |r| <= ln2 / 2, and
// exp(r) by its Taylor polynomial of degree 7.
KVASIR_HOST_DEVICE inline uint64_t WeightOf(float logit, float max, float temperature) {
  const float x = temperature == 1 ? logit - max : (logit - max) / temperature;
  if (!(x > -28.0f)) return 0;            // 2^-40 is exp(-27.7)
  constexpr float kRounds = 12582912.0f;  // 1.5 * 2^23: floats of this size are integers
  const float n = (x * 1.44269504f + kRounds) - kRounds;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const auto exponent = static_cast<uint32_t>(static_cast<int32_t>(n) + kWeightBits + 127);
  return static_cast<uint64_t>(static_cast<int64_t>(p * FloatOfBits(exponent << 23)));
}

// Returns the least weight that min-p keeps.
inline uint64_t MinWeight(float min_p) {
  return static_cast<uint64_t>(
      std::ceil(static_cast<double>(min_p) * static_cast<double>(kLargestWeight)));
}

// Returns the least weight of top-p's prefix. `total` > 0.
KVASIR_HOST_DEVICE inline uint64_t NeededWeight(float top_p, uint64_t total) {
  const double needed = ceil(static_cast<double>(top_p) * static_cast<double>(total));
  const auto rounded = static_cast<uint64_t>(needed);
  return rounded < total ? rounded : total;
}

// Returns the target of the draw: it takes the first token, in order of id, for which the running
// sum of weights exceeds the target. `uniform` in [0, 1), `total` > 0.
KVASIR_HOST_DEVICE inline uint64_t DrawTarget(double uniform, uint64_t total) {
  const auto target = static_cast<uint64_t>(uniform * static_cast<double>(total));
  return target < total ? target : total - 1;
}

KVASIR_HOST_DEVICE inline float CutOff(float logit) {
  return logit > FLT_MAX ? FLT_MAX : logit < -FLT_MAX ? -FLT_MAX : logit;
}

struct Penalties {
  float repetition = 1, frequency = 0, presence = 0;
};

// Returns the logit of a token that is in the prompt or, `occurrences` times, in the output.
KVASIR_HOST_DEVICE inline float Penalized(float logit, float occurrences,
                                          const Penalties& penalties) {
  logit = CutOff(logit > 0 ? logit / penalties.repetition : logit * penalties.repetition);
  if (occurrences == 0) return logit;
  logit = CutOff(logit - occurrences * penalties.frequency);
  return CutOff(logit - penalties.presence);
}

}  // namespace kvasir::kernels
