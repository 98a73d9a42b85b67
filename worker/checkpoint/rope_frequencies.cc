#include "worker/checkpoint/rope_frequencies.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "kernels/base/status_macros.h"

namespace kvasir::worker {
namespace {

constexpr double kTwoPi = 2.0 * std::numbers::pi;

double DynamicTheta(const ModelConfig& config, int64_t context_length) {
  const double d = static_cast<double>(config.head_dim);
  const double trained = static_cast<double>(config.max_position_embeddings);
  const double longest = std::max(static_cast<double>(context_length), trained);
  const double factor = config.rope.factor;
  return config.rope.theta * std::pow(factor * longest / trained - (factor - 1.0), d / (d - 2.0));
}

// Returns the index of the dimension pair that turns `rotations` times over the original context.
double YarnDimension(const ModelConfig& config, double rotations) {
  const double original = static_cast<double>(config.rope.original_max_position_embeddings);
  return static_cast<double>(config.head_dim) * std::log(original / (rotations * kTwoPi)) /
         (2.0 * std::log(config.rope.theta));
}

void ApplyYarn(const ModelConfig& config, std::vector<double>& inv_freq) {
  const RopeConfig& rope = config.rope;
  double low = YarnDimension(config, rope.beta_fast);
  double high = YarnDimension(config, rope.beta_slow);
  if (rope.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, static_cast<double>(config.head_dim - 1));
  if (low == high) high += 0.001;
  for (size_t i = 0; i < inv_freq.size(); ++i) {
    const double ramp = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    inv_freq[i] = inv_freq[i] / rope.factor * ramp + inv_freq[i] * (1.0 - ramp);
  }
}

// sqrt(1/t) of the YaRN paper: the factor by which q and k each grow with the extension.
double YarnMagnitude(double factor, double mscale) {
  return factor <= 1.0 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0;
}

double YarnAttentionFactor(const RopeConfig& rope) {
  if (rope.attention_factor.has_value()) return *rope.attention_factor;
  // Zero counts as not given, as in transformers.
  const double mscale = rope.mscale.value_or(0.0);
  const double mscale_all_dim = rope.mscale_all_dim.value_or(0.0);
  if (mscale == 0.0 || mscale_all_dim == 0.0) return YarnMagnitude(rope.factor, 1.0);
  return YarnMagnitude(rope.factor, mscale) / YarnMagnitude(rope.factor, mscale_all_dim);
}

double Llama3Frequency(const RopeConfig& rope, double frequency) {
  const double original = static_cast<double>(rope.original_max_position_embeddings);
  const double wavelength = kTwoPi / frequency;
  if (wavelength < original / rope.high_freq_factor) return frequency;
  if (wavelength > original / rope.low_freq_factor) return frequency / rope.factor;
  const double smooth = (original / wavelength - rope.low_freq_factor) /
                        (rope.high_freq_factor - rope.low_freq_factor);
  return (1.0 - smooth) * frequency / rope.factor + smooth * frequency;
}

}  // namespace

RopeFrequencies ComputeRopeFrequencies(const ModelConfig& config, int64_t context_length) {
  KVASIR_CHECK(context_length >= 1);
  const RopeConfig& rope = config.rope;
  const double theta =
      rope.kind == RopeKind::kDynamicNtk ? DynamicTheta(config, context_length) : rope.theta;
  RopeFrequencies result;
  for (int64_t i = 0; i < config.head_dim / 2; ++i) {
    result.inv_freq.push_back(
        std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(config.head_dim)));
  }
  switch (rope.kind) {
    case RopeKind::kPlain:
    case RopeKind::kDynamicNtk:
      break;
    case RopeKind::kLinear:
      for (double& frequency : result.inv_freq) frequency /= rope.factor;
      break;
    case RopeKind::kYarn:
      ApplyYarn(config, result.inv_freq);
      result.attention_factor = YarnAttentionFactor(rope);
      break;
    case RopeKind::kLlama3:
      for (double& frequency : result.inv_freq) frequency = Llama3Frequency(rope, frequency);
      break;
  }
  return result;
}

}  // namespace kvasir::worker
