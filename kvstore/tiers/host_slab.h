// The host tier: a slab of extents, one per block, with a free list. An extent has the same bytes
// here as on disk (kvstore/format/page_format.h), so that I/O needs no copy. Thread-compatible.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "kernels/base/buffer.h"
#include "kvstore/format/page_format.h"
#include "kvstore/tiers/freed_memory.h"

namespace kvasir::kvstore {

class HostSlab {
 public:
  // RESOURCE_EXHAUSTED when there is no memory.
  static absl::StatusOr<HostSlab> Create(const ExtentFormat& format, int64_t num_extents,
                                         FreedMemory freed);
  // Uses memory for the extents that is aligned to kExtentAlignment and outlives the slab.
  static HostSlab Over(const ExtentFormat& format, int64_t num_extents, FreedMemory freed,
                       std::byte* memory);

  // REQUIRES: num_free() > 0.
  int64_t Take();
  void Free(int64_t extent);

  // Aligned to kExtentAlignment.
  absl::Span<std::byte> extent(int64_t extent) const {
    return {base_ + extent * format_.extent_bytes(), static_cast<size_t>(format_.extent_bytes())};
  }
  std::byte* bounds(int64_t extent) const { return At(extent, format_.bounds_offset()); }
  std::byte* page(int64_t extent, int64_t page_in_block) const {
    return At(extent, format_.page_offset(page_in_block));
  }
  absl::Span<uint64_t> checksums(int64_t extent) const {
    return {reinterpret_cast<uint64_t*>(At(extent, format_.checksums_offset())),
            static_cast<size_t>(format_.shard().layout.pages_per_block())};
  }
  int64_t num_extents() const { return static_cast<int64_t>(taken_.size()); }
  int64_t num_free() const { return static_cast<int64_t>(free_.size()); }
  bool taken(int64_t extent) const { return taken_[static_cast<size_t>(extent)]; }

 private:
  explicit HostSlab(const ExtentFormat& format) : format_(format) {}
  std::byte* At(int64_t extent, int64_t offset) const {
    return base_ + extent * format_.extent_bytes() + offset;
  }

  ExtentFormat format_;
  kernels::HostBuffer buffer_;
  std::byte* base_ = nullptr;  // aligned; in buffer_, unless the memory is borrowed
  FreedMemory freed_ = FreedMemory::kAsIs;
  std::vector<bool> taken_;
  std::vector<int64_t> free_;
};

}  // namespace kvasir::kvstore
