#include "kvstore/host/host_slab.h"

#include <cstring>

#include "kernels/base/status_macros.h"

namespace kvasir::kvstore {

HostSlab::HostSlab(const ExtentFormat& format, int64_t num_extents, FreedMemory freed,
                   std::byte* memory)
    : format_(format),
      base_(memory),
      freed_(freed),
      taken_(static_cast<size_t>(num_extents)),
      stale_(static_cast<size_t>(num_extents)),
      wipes_(static_cast<size_t>(num_extents)) {
  for (int64_t extent = num_extents - 1; extent >= 0; --extent) free_.push_back(extent);
  MarkFreed(FreedMemory::kAsIs, base_, num_extents * format.extent_bytes());
}

void HostSlab::TakeWhere(absl::FunctionRef<bool(int64_t extent)> is_wanted) {
  KVASIR_CHECK(num_free() == num_extents());
  free_.clear();
  for (int64_t i = num_extents() - 1; i >= 0; --i) {
    MarkTaken(extent(i).data(), format_.extent_bytes());
    taken_[static_cast<size_t>(i)] = is_wanted(i);
    if (taken(i)) continue;
    free_.push_back(i);  // untouched: it may have no memory yet
    MarkFreed(FreedMemory::kAsIs, extent(i).data(), format_.extent_bytes());
  }
}

int64_t HostSlab::Take() {
  KVASIR_CHECK(!free_.empty());
  const int64_t taken = free_.back();
  free_.pop_back();
  taken_[static_cast<size_t>(taken)] = true;
  MarkTaken(extent(taken).data(), format_.extent_bytes());
  return taken;
}

void HostSlab::Free(int64_t freed) {
  ExtentFormat::RemoveHeader(extent(freed));
  const bool was_whole = !is_stale(freed);
  FreeUntouched(freed);
  if (was_whole) MarkStale(freed);
}

void HostSlab::FreeUntouched(int64_t freed) {
  KVASIR_CHECK(taken(freed));
  taken_[static_cast<size_t>(freed)] = false;
  free_.push_back(freed);
  const bool wipes = wipes_[static_cast<size_t>(freed)] && is_stale(freed);
  if (wipes) {  // it holds an earlier block
    std::memset(extent(freed).data(), 0, extent(freed).size());
    stale_[static_cast<size_t>(freed)] = false;
  }
  wipes_[static_cast<size_t>(freed)] = false;
  MarkFreed(freed_, extent(freed).data(), format_.extent_bytes());
}

int64_t HostSlab::WipeFree(int64_t most_bytes) {
  int64_t bytes = 0;
  for (const int64_t idle : free_) {
    if (bytes >= most_bytes) break;
    if (!is_stale(idle)) continue;
    MarkTaken(extent(idle).data(), format_.extent_bytes());
    std::memset(extent(idle).data(), 0, extent(idle).size());
    MarkFreed(freed_, extent(idle).data(), format_.extent_bytes());
    stale_[static_cast<size_t>(idle)] = false;
    bytes += format_.extent_bytes();
  }
  return bytes;
}

int64_t HostSlab::WipeTaken(int64_t taken) {
  KVASIR_CHECK(this->taken(taken));
  const absl::Span<std::byte> checksums(
      At(taken, format_.checksums_offset()),
      static_cast<size_t>(format_.bounds_offset() - format_.checksums_offset()));
  std::memset(extent(taken).data(), 0, static_cast<size_t>(kExtentHeaderBytes));
  std::memset(checksums.data(), 0, checksums.size());
  std::memset(At(taken, format_.pages_offset()), 0,
              static_cast<size_t>(format_.extent_bytes() - format_.pages_offset()));
  stale_[static_cast<size_t>(taken)] = false;
  return format_.extent_bytes() - format_.pages_offset();
}

}  // namespace kvasir::kvstore
