// A model's rotary embedding on the GPU, in one of two forms. Keys that are cached rotated need the
// angles of the step's own positions. Keys that are cached un-rotated are rotated when attention
// reads them, by angles that are kept for all positions. Made and called by the CUDA backend.
// Thread-compatible.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/base/device_buffer.h"
#include "kernels/dense/dense_cuda.h"
#include "kernels/paged/grouped_positions.h"
#include "kernels/rope/rope_positions_cuda.h"
#include "worker/backend/backend.h"
#include "worker/backend/cuda/memory/cuda_memory.h"

namespace kvasir::worker {

class CudaRope final : public Rope {
 public:
  // Waits for the stream.
  static absl::StatusOr<std::unique_ptr<CudaRope>> Create(const RopeFrequencies& frequencies,
                                                          const KeyForm& form,
                                                          const CudaStream& stream);

  // --- for keys that are cached un-rotated: the positions at which they are attended to

  // Null where keys are cached rotated.
  kernels::CudaRopePositions* positions() {
    return positions_.has_value() ? &*positions_ : nullptr;
  }
  const kernels::GroupedPositions& grouped() const { return grouped_; }

  // --- for keys that are cached rotated: the step's own positions

  // Number of angles of a position.
  int64_t half_dim() const { return half_dim_; }
  // Writes `angles`, [positions, half_dim].
  absl::Status ComputeAngles(std::span<const int64_t> positions, const kernels::RopeAngles& angles,
                             const CudaStream& stream) const;

 private:
  CudaRope() = default;

  std::optional<kernels::CudaRopePositions> positions_;
  kernels::GroupedPositions grouped_;
  kernels::DeviceBuffer inv_freq_;  // [half_dim] float64
  int64_t half_dim_ = 0;
  double attention_factor_ = 1;
};

}  // namespace kvasir::worker
