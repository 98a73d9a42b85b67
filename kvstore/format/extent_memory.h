// Memory for a few extents, aligned for disk I/O and one after the other without a gap. Used by the
// disk tier for extents on their way. Thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "kernels/base/buffer.h"
#include "kernels/base/status_macros.h"
#include "kvstore/format/page_format.h"

namespace kvasir::kvstore {

class ExtentMemory {
 public:
  // RESOURCE_EXHAUSTED when there is no memory. REQUIRES: `extent_bytes` is a multiple of
  // kExtentAlignment.
  static absl::StatusOr<ExtentMemory> Allocate(int64_t num_extents, int64_t extent_bytes) {
    KVASIR_ASSIGN_OR_RETURN(
        kernels::HostBuffer buffer,
        kernels::HostBuffer::Allocate(num_extents * extent_bytes + kExtentAlignment));
    return ExtentMemory(std::move(buffer), extent_bytes);
  }

  absl::Span<std::byte> operator[](size_t extent) const {
    return {begin_ + static_cast<int64_t>(extent) * extent_bytes_,
            static_cast<size_t>(extent_bytes_)};
  }

 private:
  ExtentMemory(kernels::HostBuffer buffer, int64_t extent_bytes)
      : buffer_(std::move(buffer)),
        begin_(buffer_.data() + -reinterpret_cast<uintptr_t>(buffer_.data()) % kExtentAlignment),
        extent_bytes_(extent_bytes) {}

  kernels::HostBuffer buffer_;
  std::byte* begin_;
  int64_t extent_bytes_;
};

}  // namespace kvasir::kvstore
