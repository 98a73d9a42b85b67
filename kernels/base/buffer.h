// Owned host memory: zeroed, aligned to 64 bytes (a cache line and an AVX-512 register), movable,
// freed by the destructor. Whoever owns weights, scratch or activations holds one and hands out
// TensorViews into it. Large buffers are zeroed lazily by the operating system, so allocating does
// not touch the pages; they may be huge ones, of 2 MiB. Thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"

namespace kvasir::kernels {

class HostBuffer {
 public:
  static constexpr int64_t kAlignment = 64;

  // An empty buffer: data() is null, size_bytes() is 0.
  HostBuffer() = default;
  // INVALID_ARGUMENT for a negative size, RESOURCE_EXHAUSTED when there is no memory. Zero bytes
  // give an empty buffer.
  static absl::StatusOr<HostBuffer> Allocate(int64_t bytes);

  HostBuffer(HostBuffer&& other) noexcept;
  HostBuffer& operator=(HostBuffer&& other) noexcept;

  std::byte* data() const { return data_; }
  template <typename T>
  T* As() const {
    return reinterpret_cast<T*>(data_);
  }
  int64_t size_bytes() const { return size_bytes_; }

 private:
  struct Free {
    void operator()(void* memory) const;
  };
  std::unique_ptr<void, Free> memory_;  // as calloc returned it, up to kAlignment - 1 before data_
  std::byte* data_ = nullptr;
  int64_t size_bytes_ = 0;
};

// Cuts large buffers into pieces, so that memory of less than a huge page lies in huge pages too: a
// model has many weights of a megabyte, which are read once a step. A piece keeps its buffer alive,
// and may outlive the arena.
class HostArena {
 public:
  struct Piece {
    std::shared_ptr<const HostBuffer> buffer;
    std::byte* data = nullptr;  // zeroed, aligned as a HostBuffer

    template <typename T>
    T* As() const {
      return reinterpret_cast<T*>(data);
    }
  };

  // Buffers of so many bytes, larger ones for pieces of more than half of that. 0: one a piece.
  explicit HostArena(int64_t buffer_bytes) : buffer_bytes_(buffer_bytes) {}

  // Errors as of HostBuffer::Allocate.
  absl::StatusOr<Piece> Take(int64_t bytes);

 private:
  const int64_t buffer_bytes_;
  std::shared_ptr<const HostBuffer> buffer_;  // whose pieces are handed out
  int64_t used_ = 0;
};

}  // namespace kvasir::kernels
