#include "worker/backend/cuda/cuda_rope.h"

#include <cstddef>
#include <iterator>

#include "kernels/base/status_macros.h"

namespace kvasir::worker {

absl::StatusOr<std::unique_ptr<CudaRope>> CudaRope::Create(const RopeFrequencies& frequencies,
                                                           const KeyForm& form,
                                                           const CudaStream& stream) {
  std::unique_ptr<CudaRope> rope(new CudaRope());
  if (!form.rotated) {
    KVASIR_ASSIGN_OR_RETURN(
        rope->positions_,
        kernels::CudaRopePositions::Create(frequencies.inv_freq, frequencies.attention_factor));
    rope->grouped_ = form.grouped;
    return rope;
  }
  rope->half_dim_ = std::ssize(frequencies.inv_freq);
  rope->attention_factor_ = frequencies.attention_factor;
  const int64_t bytes = rope->half_dim_ * static_cast<int64_t>(sizeof(double));
  KVASIR_ASSIGN_OR_RETURN(rope->inv_freq_, kernels::DeviceBuffer::Allocate(bytes));
  KVASIR_RETURN_IF_ERROR(
      stream.CopyToDevice(rope->inv_freq_.data(), frequencies.inv_freq.data(), bytes));
  KVASIR_RETURN_IF_ERROR(stream.Wait());
  return rope;
}

absl::Status CudaRope::ComputeAngles(std::span<const int64_t> positions,
                                     const kernels::RopeAngles& angles,
                                     const CudaStream& stream) const {
  return kernels::ComputeRopeAngles(
      {.positions = positions,
       .inv_freq = {inv_freq_.As<double>(), static_cast<size_t>(half_dim_)},
       .attention_scaling = attention_factor_,
       .angles = angles},
      stream.get());
}

}  // namespace kvasir::worker
