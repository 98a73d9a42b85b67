#include "kvstore/tiers/host_slab.h"

#include "kernels/base/status_macros.h"

namespace kvasir::kvstore {
namespace {

int64_t AlignUp(int64_t bytes) {
  constexpr int64_t kAlignment = kernels::HostBuffer::kAlignment;
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

int64_t HostSlab::ExtentBytes(const kernels::KvLayout& layout) {
  return AlignUp(layout.block_bounds_bytes()) + layout.block_bytes() +
         AlignUp(layout.pages_per_block() * static_cast<int64_t>(sizeof(uint64_t)));
}

absl::StatusOr<HostSlab> HostSlab::Create(const kernels::KvLayout& layout, int64_t num_extents,
                                          FreedMemory freed) {
  HostSlab slab;
  slab.layout_ = layout;
  slab.extent_bytes_ = ExtentBytes(layout);
  slab.pages_offset_ = AlignUp(layout.block_bounds_bytes());
  slab.checksums_offset_ = slab.pages_offset_ + layout.block_bytes();
  slab.freed_ = freed;
  KVASIR_ASSIGN_OR_RETURN(slab.buffer_,
                          kernels::HostBuffer::Allocate(num_extents * slab.extent_bytes_));
  slab.taken_.resize(static_cast<size_t>(num_extents));
  for (int64_t extent = num_extents - 1; extent >= 0; --extent) slab.free_.push_back(extent);
  MarkFreed(FreedMemory::kAsIs, slab.buffer_.data(), slab.buffer_.size_bytes());
  return slab;
}

int64_t HostSlab::Take() {
  KVASIR_CHECK(!free_.empty());
  const int64_t extent = free_.back();
  free_.pop_back();
  taken_[static_cast<size_t>(extent)] = true;
  MarkTaken(bounds(extent), extent_bytes_);
  return extent;
}

void HostSlab::Free(int64_t extent) {
  KVASIR_CHECK(taken(extent));
  taken_[static_cast<size_t>(extent)] = false;
  free_.push_back(extent);
  MarkFreed(freed_, bounds(extent), extent_bytes_);
}

}  // namespace kvasir::kvstore
