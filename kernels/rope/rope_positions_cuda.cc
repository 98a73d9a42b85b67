#include "kernels/rope/rope_positions_cuda.h"

#include <bit>
#include <numeric>
#include <vector>

#include "kernels/base/cuda_status.h"
#include "kernels/base/status_macros.h"
#include "kernels/dense/dense_cuda.h"

namespace kvasir::kernels {
namespace {

// Smallest size. It grows by doubling.
constexpr int64_t kFewestPositions = 1024;

template <typename T>
absl::StatusOr<DeviceBuffer> CopyToDevice(std::span<const T> values) {
  const auto bytes = static_cast<int64_t>(values.size_bytes());
  KVASIR_ASSIGN_OR_RETURN(DeviceBuffer buffer, DeviceBuffer::Allocate(bytes));
  KVASIR_RETURN_IF_ERROR(CudaStatus(
      cudaMemcpy(buffer.data(), values.data(), values.size_bytes(), cudaMemcpyHostToDevice),
      "copying to the device"));
  return buffer;
}

}  // namespace

absl::StatusOr<CudaRopePositions> CudaRopePositions::Create(std::span<const double> inv_freq,
                                                            double attention_scaling) {
  CudaRopePositions positions;
  positions.half_dim_ = std::ssize(inv_freq);
  positions.attention_scaling_ = attention_scaling;
  KVASIR_ASSIGN_OR_RETURN(positions.inv_freq_, CopyToDevice(inv_freq));
  return positions;
}

absl::Status CudaRopePositions::Reserve(int64_t end, cudaStream_t stream) {
  if (end <= view_.end) return absl::OkStatus();
  const auto count = static_cast<int64_t>(
      std::bit_ceil(static_cast<uint64_t>(end > kFewestPositions ? end : kFewestPositions)));
  std::vector<int64_t> positions(static_cast<size_t>(count));
  std::iota(positions.begin(), positions.end(), int64_t{0});
  KVASIR_ASSIGN_OR_RETURN(const DeviceBuffer own,
                          CopyToDevice(std::span<const int64_t>(positions)));
  view_ = {};
  angles_ = {};  // there may not be room for both
  const int64_t elements = count * half_dim_;
  KVASIR_ASSIGN_OR_RETURN(
      angles_, DeviceBuffer::Allocate(2 * elements * static_cast<int64_t>(sizeof(float))));
  float* const cos = angles_.As<float>();
  float* const sin = cos + elements;
  const auto table = [&](float* angles) {
    return TensorView(angles, DType::kFloat32, {count, half_dim_}, Device::kCuda);
  };
  KVASIR_RETURN_IF_ERROR(
      ComputeRopeAngles({.positions = {own.As<int64_t>(), positions.size()},
                         .inv_freq = {inv_freq_.As<double>(), static_cast<size_t>(half_dim_)},
                         .attention_scaling = attention_scaling_,
                         .angles = {.cos = table(cos), .sin = table(sin)}},
                        stream));
  KVASIR_RETURN_IF_ERROR(CudaStatus(cudaStreamSynchronize(stream), "computing angles"));
  view_ = {.cos = cos,
           .sin = sin,
           .end = count,
           .attention_scaling = static_cast<float>(attention_scaling_),
           .inv_freq = inv_freq_.As<double>()};
  return absl::OkStatus();
}

}  // namespace kvasir::kernels
