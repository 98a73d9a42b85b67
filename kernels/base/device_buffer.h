// Owned device memory (plain cudaMalloc) and owned pinned host memory that the device can read in
// place: movable, freed by the destructor. Contents are unspecified until written.
// Thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"

namespace kvasir::kernels {

namespace internal {

struct FreeDevice {
  void operator()(std::byte* memory) const;
};
struct FreePinned {
  void operator()(std::byte* memory) const;
};

}  // namespace internal

template <typename Free>
class CudaBuffer {
 public:
  CudaBuffer() = default;
  // INVALID_ARGUMENT for a negative size. RESOURCE_EXHAUSTED when memory ran out or cannot be
  // pinned. Zero bytes give an empty buffer.
  static absl::StatusOr<CudaBuffer> Allocate(int64_t bytes);

  std::byte* data() const { return memory_.get(); }
  template <typename T>
  T* As() const {
    return reinterpret_cast<T*>(memory_.get());
  }
  int64_t size_bytes() const { return size_bytes_; }

 private:
  std::unique_ptr<std::byte, Free> memory_;
  int64_t size_bytes_ = 0;
};

using DeviceBuffer = CudaBuffer<internal::FreeDevice>;
// The device reads this memory at the host's address.
using PinnedBuffer = CudaBuffer<internal::FreePinned>;

}  // namespace kvasir::kernels
