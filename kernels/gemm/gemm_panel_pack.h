// Internal to gemm: weights in the layout of the panel engine (gemm_panel.h). Functions without
// state.
#pragma once

#include <cstdint>

#include "absl/status/status.h"

#include "kernels/base/buffer.h"
#include "kernels/gemm/gemm_engine.h"
#include "kernels/gemm/gemm_panel.h"

namespace kvasir::kernels {

// The bfloat16 at or above max / 127: the step of int8 weights of which the largest is `max` >= 0
// and finite.
float Int8Scale(float max);

// The whole number in [-127, 127] nearest to weight / scale; 0 where the scale is.
int8_t QuantizeToInt8(float weight, float scale);

struct PackedPanels {
  HostArena::Piece data;
  HostBuffer bias;  // empty without a bias
};

// For kernels of `lanes` floats. INVALID_ARGUMENT: int8 of weights that are not finite;
// RESOURCE_EXHAUSTED: no memory.
absl::StatusOr<PackedPanels> PackPanels(const WeightSource& source, PanelFormat format,
                                        int64_t lanes, HostArena& memory);

}  // namespace kvasir::kernels
