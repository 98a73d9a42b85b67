// The device tier: a bounded arena of page slots with a free list, and the CLOCK that picks the
// page that leaves. It knows pages only by their number in the store's page table; the store maps
// and unmaps. Thread-compatible.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/base/buffer.h"
#include "kernels/paged/paged_kv.h"
#include "kvstore/host/freed_memory.h"

namespace kvasir::kvstore {

using kernels::kNeverTouched;

class DeviceArena {
 public:
  // Uses memory for `num_slots` pages.
  DeviceArena(kernels::HostBuffer memory, int64_t num_slots, int64_t page_bytes, FreedMemory freed);

  // Takes a slot for the page, pinned. REQUIRES: num_free() > 0.
  int64_t Take(int64_t page);
  void Unpin(int64_t slot);
  void Free(int64_t slot);

  // Returns the slot whose page should leave: not pinned, and not read since the hand last passed
  // it. `last_touched` is by page. Pages read in step `spared` stay. Returns nothing when none may
  // leave.
  std::optional<int64_t> FindVictim(const uint32_t* last_touched, std::optional<uint32_t> spared);

  std::byte* page_memory(int64_t slot) const { return memory_.data() + slot * page_bytes_; }
  int64_t slot_of(const std::byte* page) const { return (page - memory_.data()) / page_bytes_; }
  // Returns the page in the slot, or -1.
  int64_t page(int64_t slot) const { return slots_[static_cast<size_t>(slot)].page; }
  int64_t num_slots() const { return static_cast<int64_t>(slots_.size()); }
  int64_t num_free() const { return static_cast<int64_t>(free_.size()); }
  int64_t num_pinned() const { return num_pinned_; }

  // Free, pinned and other slots must add up; INTERNAL with the discrepancy.
  absl::Status CheckIntegrity() const;

 private:
  struct Slot {
    int64_t page = -1;
    bool pinned = false;
    uint32_t seen = 0;  // last read that the hand has seen
  };

  kernels::HostBuffer memory_;
  int64_t page_bytes_;
  FreedMemory freed_;
  std::vector<Slot> slots_;
  std::vector<int64_t> free_;
  int64_t num_pinned_ = 0;
  size_t hand_ = 0;
};

}  // namespace kvasir::kvstore
