// RopePositions (rope.h) on the GPU: the angles of all positions from 0 on, in device memory, kept
// from step to step. Held by the CUDA backend. Thread-compatible. Only in builds with CUDA.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/base/device_buffer.h"
#include "kernels/rope/rope.h"

namespace kvasir::kernels {

class CudaRopePositions {
 public:
  // Parameters as for RopeTable; `inv_freq` lies in host memory.
  static absl::StatusOr<CudaRopePositions> Create(std::span<const double> inv_freq,
                                                  double attention_scaling);

  // Computes the positions below `end`. Each takes 4 * head_dim bytes, which are kept. A larger
  // `end` recomputes all angles and waits for the device, whose remaining work must not use the
  // view. RESOURCE_EXHAUSTED when there is no room.
  absl::Status Reserve(int64_t end, cudaStream_t stream);
  // Returns a view of the computed positions, valid until the next Reserve that computes more.
  const DeviceRopePositions& view() const { return view_; }

 private:
  CudaRopePositions() = default;

  int64_t half_dim_ = 0;
  double attention_scaling_ = 1;
  DeviceBuffer inv_freq_;
  DeviceBuffer angles_;  // cosines, then sines
  DeviceRopePositions view_;
};

}  // namespace kvasir::kernels
