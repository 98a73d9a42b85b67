// Copies of host memory on the device, for tests of the GPU's ops; they live as long as the object.
// Thread-compatible.
#pragma once

#include <cuda_runtime_api.h>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/base/cuda_status.h"
#include "kernels/base/device_buffer.h"
#include "kernels/base/tensor.h"
#include "kernels/rope/rope.h"

namespace kvasir::kernels {

inline bool HasGpu() {
  int devices = 0;
  return cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0;
}

class DeviceMemory {
 public:
  // The copy begins `shift` bytes behind an aligned address.
  template <typename T>
  absl::StatusOr<T*> Copy(const T* from, size_t count, int64_t shift = 0) {
    const size_t bytes = count * sizeof(T);
    // A byte more, so that what is empty has an address too.
    KVASIR_ASSIGN_OR_RETURN(DeviceBuffer buffer,
                            DeviceBuffer::Allocate(static_cast<int64_t>(bytes) + shift + 1));
    std::byte* to = buffer.data() + shift;
    if (bytes > 0) {
      KVASIR_RETURN_IF_ERROR(
          CudaStatus(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), "copying to the device"));
    }
    buffers_.push_back(std::move(buffer));
    return reinterpret_cast<T*>(to);
  }
  absl::StatusOr<TensorView> Copy(const TensorView& view, int64_t shift = 0) {
    KVASIR_ASSIGN_OR_RETURN(std::byte * data, Copy(static_cast<const std::byte*>(view.data()),
                                                   static_cast<size_t>(view.size_bytes()), shift));
    return WithData(view, data);
  }
  // The angles that are known of positions; null: of none.
  absl::StatusOr<DeviceRopePositions> Copy(const RopePositions* rope) {
    if (rope == nullptr) return DeviceRopePositions{};
    const auto count = static_cast<size_t>(rope->end() * rope->head_dim() / 2);
    DeviceRopePositions copy = {.end = rope->end(),
                                .attention_scaling = static_cast<float>(rope->attention_scaling())};
    KVASIR_ASSIGN_OR_RETURN(copy.cos, Copy(rope->cos(0), count));
    KVASIR_ASSIGN_OR_RETURN(copy.sin, Copy(rope->sin(0), count));
    KVASIR_ASSIGN_OR_RETURN(copy.inv_freq, Copy(rope->inv_freq().data(), rope->inv_freq().size()));
    return copy;
  }
  // Copies the results back; waits for them.
  static absl::Status Fetch(const TensorView& from, const TensorView& to) {
    return Fetch(from.data(), to.data(), static_cast<size_t>(to.size_bytes()));
  }
  static absl::Status Fetch(const void* from, void* to, size_t bytes) {
    return CudaStatus(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), "fetching results");
  }

 private:
  static TensorView WithData(const TensorView& view, std::byte* data) {
    const auto dim = [&](int i) { return view.dim(i); };
    switch (view.rank()) {
      case 1:
        return TensorView(data, view.dtype(), {dim(0)}, Device::kCuda);
      case 2:
        return TensorView(data, view.dtype(), {dim(0), dim(1)}, Device::kCuda);
      default:
        return TensorView(data, view.dtype(), {dim(0), dim(1), dim(2)}, Device::kCuda);
    }
  }

  std::vector<DeviceBuffer> buffers_;
};

}  // namespace kvasir::kernels
