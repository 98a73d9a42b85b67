// Working memory of ops. The caller owns one Scratch for each thread that calls ops and passes it
// in, so that an op allocates only when it needs more than every call before it. The contents do
// not outlive the op that reserved them. Thread-compatible: one op at a time.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"

#include "kernels/base/buffer.h"
#include "kernels/base/status_macros.h"

namespace kvasir::kernels {

class Scratch {
 public:
  // Returns at least `bytes` bytes, 64-byte aligned, with unspecified contents. Earlier
  // reservations become invalid. The buffer grows by at least half, so that a context that grows by
  // one token a step does not allocate in every step. RESOURCE_EXHAUSTED when there is no memory.
  absl::StatusOr<std::byte*> Reserve(int64_t bytes) {
    if (bytes > buffer_.size_bytes()) {
      const int64_t grown = buffer_.size_bytes() + buffer_.size_bytes() / 2;
      KVASIR_ASSIGN_OR_RETURN(buffer_, HostBuffer::Allocate(std::max(bytes, grown)));
    }
    return buffer_.data();
  }
  int64_t size_bytes() const { return buffer_.size_bytes(); }

 private:
  HostBuffer buffer_;
};

// Cuts reserved memory into arrays, each starting on its own cache line. Over null memory it
// returns null and only counts, so that one function both sizes a layout and lays it out.
class ScratchPieces {
 public:
  explicit ScratchPieces(std::byte* memory) : memory_(memory) {}
  template <typename T>
  T* Take(int64_t count) {
    std::byte* piece = memory_ == nullptr ? nullptr : memory_ + bytes_;
    bytes_ += (count * static_cast<int64_t>(sizeof(T)) + kAlignment - 1) / kAlignment * kAlignment;
    return reinterpret_cast<T*>(piece);
  }
  int64_t bytes() const { return bytes_; }

 private:
  static constexpr int64_t kAlignment = HostBuffer::kAlignment;
  std::byte* const memory_;
  int64_t bytes_ = 0;
};

}  // namespace kvasir::kernels
