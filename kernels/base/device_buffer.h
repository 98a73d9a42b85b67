// Owned device memory (plain cudaMalloc) and owned pinned host memory that the device can read in
// place: movable, freed by the destructor. Contents are unspecified until written.
// Thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"

namespace kvasir::kernels {

class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  // INVALID_ARGUMENT for a negative size, RESOURCE_EXHAUSTED when the device has no room.
  static absl::StatusOr<DeviceBuffer> Allocate(int64_t bytes);

  std::byte* data() const { return memory_.get(); }
  template <typename T>
  T* As() const {
    return reinterpret_cast<T*>(memory_.get());
  }
  int64_t size_bytes() const { return size_bytes_; }

 private:
  struct Free {
    void operator()(std::byte* memory) const;
  };
  std::unique_ptr<std::byte, Free> memory_;
  int64_t size_bytes_ = 0;
};

// The device reads it at the same address as the host.
class PinnedBuffer {
 public:
  PinnedBuffer() = default;
  // INVALID_ARGUMENT for a negative size, RESOURCE_EXHAUSTED when the memory cannot be pinned.
  static absl::StatusOr<PinnedBuffer> Allocate(int64_t bytes);

  std::byte* data() const { return memory_.get(); }
  template <typename T>
  T* As() const {
    return reinterpret_cast<T*>(memory_.get());
  }
  int64_t size_bytes() const { return size_bytes_; }

 private:
  struct Free {
    void operator()(std::byte* memory) const;
  };
  std::unique_ptr<std::byte, Free> memory_;
  int64_t size_bytes_ = 0;
};

}  // namespace kvasir::kernels
