// The rotary embedding's angles: position p turns pair i of a head's dimensions (i, i + head_dim/2)
// by p * inv_freq[i], and cos and sin are multiplied by attention_factor. It hides the kinds of
// context extension that models are trained with. Called once when a worker starts. A function
// without state.
//
//   f_i     = theta^(-2i/D),  i = 0 .. D/2 - 1,  D = head_dim
//   plain     f_i
//   linear    f_i / factor
//   dynamic   f_i with theta' = theta * (factor*N/L - (factor-1))^(D/(D-2)),  N = max(context, L),
//             L = max_position_embeddings
//   yarn      f_i/factor * ramp_i + f_i * (1 - ramp_i)
//             ramp_i = clamp((i - low)/(high - low), 0, 1)
//             low, high = cd(beta_fast), cd(beta_slow), rounded outwards when `truncate`;
//             cd(r) = D * ln(original/(2 pi r)) / (2 ln theta), held within [0, D-1]
//   llama3    by wavelength w = 2 pi/f_i: w < original/high: f_i;  w > original/low: f_i/factor;
//             else (1-s) f_i/factor + s f_i  with s = (original/w - low)/(high - low)
//
// As transformers computes them (modeling_rope_utils.py); yarn: arXiv 2309.00071.
#pragma once

#include <cstdint>
#include <vector>

#include "worker/checkpoint/model_config.h"

namespace kvasir::worker {

struct RopeFrequencies {
  std::vector<double> inv_freq;   // [head_dim / 2], radians per position
  double attention_factor = 1.0;  // > 0; differs from 1 only for yarn
};

// `context_length` is the longest sequence that will be served, prompt and answer. Only dynamic
// depends on it: transformers changes those frequencies as a sequence grows, which would make the
// keys already cached wrong. Here they are fixed for the longest sequence, so they equal those of
// transformers at that length, and at any length up to max_position_embeddings when
// `context_length` is not above it. REQUIRES: a config from ParseModelConfig; context_length >= 1.
RopeFrequencies ComputeRopeFrequencies(const ModelConfig& config, int64_t context_length);

}  // namespace kvasir::worker
