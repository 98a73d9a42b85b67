#include "kvstore/tiers/host_slab.h"

#include <utility>

#include "kernels/base/status_macros.h"

namespace kvasir::kvstore {

absl::StatusOr<HostSlab> HostSlab::Create(const ExtentFormat& format, int64_t num_extents,
                                          FreedMemory freed) {
  const int64_t bytes = num_extents * format.extent_bytes();
  KVASIR_ASSIGN_OR_RETURN(kernels::HostBuffer buffer,
                          kernels::HostBuffer::Allocate(bytes + kExtentAlignment));
  const auto address = reinterpret_cast<uintptr_t>(buffer.data());
  constexpr auto kMask = static_cast<uintptr_t>(kExtentAlignment - 1);
  HostSlab slab =
      Over(format, num_extents, freed, buffer.data() + (((address + kMask) & ~kMask) - address));
  slab.buffer_ = std::move(buffer);
  return slab;
}

HostSlab HostSlab::Over(const ExtentFormat& format, int64_t num_extents, FreedMemory freed,
                        std::byte* memory) {
  HostSlab slab(format);
  slab.freed_ = freed;
  slab.base_ = memory;
  slab.taken_.resize(static_cast<size_t>(num_extents));
  for (int64_t extent = num_extents - 1; extent >= 0; --extent) slab.free_.push_back(extent);
  MarkFreed(FreedMemory::kAsIs, slab.base_, num_extents * format.extent_bytes());
  return slab;
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
  KVASIR_CHECK(taken(freed));
  taken_[static_cast<size_t>(freed)] = false;
  free_.push_back(freed);
  MarkFreed(freed_, extent(freed).data(), format_.extent_bytes());
}

}  // namespace kvasir::kvstore
