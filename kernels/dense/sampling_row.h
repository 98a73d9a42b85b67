// Internal to sampling: one row.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/dense/sampling.h"

namespace kvasir::kernels {

// All of [vocab], contents ignored and overwritten.
struct SamplingScratch {
  std::span<float> logits;
  std::span<float> weights;
  std::span<int32_t> candidates;
};

SampledToken SampleRow(std::span<const float> logits, const SamplingOptions& options,
                       const SamplingScratch& scratch);

}  // namespace kvasir::kernels
