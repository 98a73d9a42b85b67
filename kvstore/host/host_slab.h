// The host tier: a slab of extents, one per block, with a free list. An extent has the same bytes
// here as on disk (kvstore/format/page_format.h), so that I/O needs no copy. An extent that is not
// taken has no header, so that nobody finds its last block. Thread-compatible.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/types/span.h"

#include "kvstore/format/page_format.h"
#include "kvstore/host/freed_memory.h"

namespace kvasir::kvstore {

class HostSlab {
 public:
  // `memory` for the extents is aligned to kExtentAlignment and outlives the slab.
  HostSlab(const ExtentFormat& format, int64_t num_extents, FreedMemory freed, std::byte* memory);

  // Takes all extents that hold something wanted. REQUIRES: none is taken.
  void TakeWhere(absl::FunctionRef<bool(int64_t extent)> is_wanted);
  // REQUIRES: num_free() > 0.
  int64_t Take();
  void Free(int64_t extent);
  // The same for an extent that nobody has touched since Take: it may have no memory yet.
  void FreeUntouched(int64_t extent);

  // --- bytes of blocks that are gone

  // An extent that nobody has taken holds some.
  void MarkStale(int64_t extent) { stale_[static_cast<size_t>(extent)] = true; }
  // All bytes of a taken extent are those of its block.
  void MarkWhole(int64_t extent) { stale_[static_cast<size_t>(extent)] = false; }
  // Overwrites stale extents that are not taken, about `most_bytes`. Returns the number of bytes;
  // 0: there are none left.
  int64_t WipeFree(int64_t most_bytes);
  // Overwrites what a taken extent holds of earlier blocks, except bounds: a block that is written
  // has its own there. Returns the number of bytes.
  int64_t WipeTaken(int64_t extent);
  // The extent is overwritten when it is freed, unless it is marked whole before.
  bool is_stale(int64_t extent) const { return stale_[static_cast<size_t>(extent)]; }
  void WipeWhenFreed(int64_t extent) { wipes_[static_cast<size_t>(extent)] = true; }

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
  std::byte* At(int64_t extent, int64_t offset) const {
    return base_ + extent * format_.extent_bytes() + offset;
  }

  ExtentFormat format_;
  std::byte* base_ = nullptr;
  FreedMemory freed_ = FreedMemory::kAsIs;
  std::vector<bool> taken_;
  std::vector<bool> stale_;  // holds bytes of a block that is gone
  std::vector<bool> wipes_;  // is overwritten when it is freed
  std::vector<int64_t> free_;
};

}  // namespace kvasir::kvstore
