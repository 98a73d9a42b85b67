// The host tier: a slab of equal extents, one a block, with a free list. Hidden: where the parts of
// an extent lie. Thread-compatible.
//
//   extent: [page bounds of the block][pages][checksum of each page: 8 bytes]   parts 64-aligned
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "kernels/base/buffer.h"
#include "kernels/paged/paged_kv.h"
#include "kvstore/tiers/freed_memory.h"

namespace kvasir::kvstore {

class HostSlab {
 public:
  static int64_t ExtentBytes(const kernels::KvLayout& layout);
  // RESOURCE_EXHAUSTED when there is no memory.
  static absl::StatusOr<HostSlab> Create(const kernels::KvLayout& layout, int64_t num_extents,
                                         FreedMemory freed);

  // REQUIRES: num_free() > 0.
  int64_t Take();
  void Free(int64_t extent);

  std::byte* bounds(int64_t extent) const { return buffer_.data() + extent * extent_bytes_; }
  std::byte* page(int64_t extent, int64_t page_in_block) const {
    return bounds(extent) + pages_offset_ + page_in_block * layout_.page_bytes();
  }
  absl::Span<uint64_t> checksums(int64_t extent) const {
    return {reinterpret_cast<uint64_t*>(bounds(extent) + checksums_offset_),
            static_cast<size_t>(layout_.pages_per_block())};
  }
  int64_t num_extents() const { return static_cast<int64_t>(taken_.size()); }
  int64_t num_free() const { return static_cast<int64_t>(free_.size()); }
  bool taken(int64_t extent) const { return taken_[static_cast<size_t>(extent)]; }

 private:
  HostSlab() = default;

  kernels::HostBuffer buffer_;
  kernels::KvLayout layout_;
  int64_t extent_bytes_ = 0;
  int64_t pages_offset_ = 0;
  int64_t checksums_offset_ = 0;
  FreedMemory freed_ = FreedMemory::kAsIs;
  std::vector<bool> taken_;
  std::vector<int64_t> free_;
};

}  // namespace kvasir::kvstore
