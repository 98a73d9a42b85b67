// Host memory with an owner: zeroed, aligned to 64 bytes (a cache line and an AVX-512 register),
// movable, freed by the destructor. The owner of weights, scratch or activations holds a buffer and
// hands out TensorViews into it. The operating system zeroes large buffers lazily, so allocating
// does not touch the pages. The pages may be huge ones of 2 MiB. Thread-compatible.
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
// model has many weights of about a megabyte, each read once a step. A piece keeps its buffer alive
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

  // Allocates buffers of `buffer_bytes` bytes. A piece of more than half of that gets its own
  // buffer, as does every piece when `buffer_bytes` is 0.
  explicit HostArena(int64_t buffer_bytes) : buffer_bytes_(buffer_bytes) {}

  // Returns the errors of HostBuffer::Allocate.
  absl::StatusOr<Piece> Take(int64_t bytes);

 private:
  const int64_t buffer_bytes_;
  std::shared_ptr<const HostBuffer> buffer_;  // the buffer that pieces are cut from
  int64_t used_ = 0;
};

}  // namespace kvasir::kernels
