#include "kvstore/tiers/device_arena.h"

#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"

namespace kvasir::kvstore {

DeviceArena::DeviceArena(kernels::HostBuffer memory, int64_t num_slots, int64_t page_bytes,
                         FreedMemory freed)
    : memory_(std::move(memory)),
      page_bytes_(page_bytes),
      freed_(freed),
      slots_(static_cast<size_t>(num_slots)) {
  for (int64_t slot = num_slots - 1; slot >= 0; --slot) free_.push_back(slot);
  MarkFreed(FreedMemory::kAsIs, memory_.data(), num_slots * page_bytes);
}

int64_t DeviceArena::Take(int64_t page) {
  KVASIR_CHECK(!free_.empty());
  const int64_t slot = free_.back();
  free_.pop_back();
  slots_[static_cast<size_t>(slot)] = {.page = page, .pinned = true, .seen = 0};
  ++num_pinned_;
  MarkTaken(page_memory(slot), page_bytes_);
  return slot;
}

void DeviceArena::Unpin(int64_t slot) {
  Slot& s = slots_[static_cast<size_t>(slot)];
  KVASIR_CHECK(s.pinned);
  s.pinned = false;
  --num_pinned_;
}

void DeviceArena::Free(int64_t slot) {
  Slot& s = slots_[static_cast<size_t>(slot)];
  KVASIR_CHECK(s.page >= 0);
  if (s.pinned) --num_pinned_;
  s = Slot();
  free_.push_back(slot);
  MarkFreed(freed_, page_memory(slot), page_bytes_);
}

std::optional<int64_t> DeviceArena::FindVictim(const uint32_t* last_touched,
                                               std::optional<uint32_t> spared) {
  // Two rounds: the first records the reads, the second finds a page that was not read since.
  for (size_t i = 0; i < 2 * slots_.size(); ++i) {
    const size_t at = hand_;
    hand_ = (hand_ + 1) % slots_.size();
    Slot& slot = slots_[at];
    if (slot.page < 0 || slot.pinned) continue;
    const uint32_t touched = last_touched[slot.page];
    if (touched != kNeverTouched && touched == spared) continue;
    if (touched != kNeverTouched && touched > slot.seen) {
      slot.seen = touched;
      continue;
    }
    return static_cast<int64_t>(at);
  }
  return std::nullopt;
}

absl::Status DeviceArena::CheckIntegrity() const {
  int64_t used = 0;
  int64_t pinned = 0;
  for (const Slot& slot : slots_) {
    used += slot.page >= 0 ? 1 : 0;
    pinned += slot.pinned ? 1 : 0;
  }
  if (used + num_free() != num_slots() || pinned != num_pinned_) {
    return absl::InternalError(absl::StrCat("device arena: ", used, " slots used and ", num_free(),
                                            " free of ", num_slots(), "; ", pinned,
                                            " pinned, counted ", num_pinned_));
  }
  for (int64_t slot : free_) {
    if (page(slot) >= 0) {
      return absl::InternalError(
          absl::StrCat("device arena: slot ", slot, " is free and holds page ", page(slot)));
    }
  }
  return absl::OkStatus();
}

}  // namespace kvasir::kvstore
