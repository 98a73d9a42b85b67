// The reference of the residency protocol. The GPU's kernels leave the same state, entry by entry.
#include <algorithm>
#include <bit>
#include <cstring>

#include "kernels/residency/residency.h"

namespace kvasir::kernels {
namespace {

// Pages that must not be evicted: those read in step `step` or later, of the blocks that `running`
// marks, or of all if it is empty.
struct Spared {
  uint32_t step = kNeverTouched;
  std::span<const uint8_t> running = {};
};

// CLOCK: returns whether the slot's page leaves. A page that was read since the hand last passed
// stays once more.
bool IsVictim(const ResidencyState& s, int64_t slot, const Spared& spared) {
  if (s.slot_states[slot] != SlotState::kCached) return false;
  const int64_t page = s.slot_pages[slot];
  const uint32_t touched = s.last_touched[page];
  if (touched == kNeverTouched) return true;
  const bool runs = spared.running.empty() ||
                    spared.running[static_cast<size_t>(page / s.shape.pages_per_extent)] != 0;
  if (runs && touched >= spared.step) return false;
  if (touched <= s.slot_seen[slot]) return true;
  s.slot_seen[slot] = touched;
  return false;
}

void Evict(const ResidencyState& s, int64_t slot) {
  const int64_t page = s.slot_pages[slot];
  s.pages[page] = s.shape.home(page);
  s.slot_pages[slot] = -1;
  ++s.counters->evictions;
}

// Puts up to `wanted` slots into `taken`: first the free ones, then victims among the next
// `most_examined` slots. Returns their number.
int64_t TakeSlots(const ResidencyState& s, int64_t wanted, const Spared& spared,
                  int64_t most_examined) {
  ResidencyCounters& counters = *s.counters;
  int64_t count = 0;
  for (int64_t slot = 0; counters.free_slots > 0 && count < wanted; ++slot) {
    uint32_t& word = s.free_bits[slot / kWordBits];
    const uint32_t bit = 1u << (slot % kWordBits);
    if ((word & bit) == 0) continue;
    word &= ~bit;
    --counters.free_slots;
    s.taken[count++] = static_cast<int32_t>(slot);
  }
  for (int64_t i = 0; i < most_examined && count < wanted; ++i) {
    const int64_t slot = counters.hand;
    counters.hand = (slot + 1) % s.shape.num_slots;
    if (!IsVictim(s, slot, spared)) continue;
    Evict(s, slot);
    s.slot_states[slot] = SlotState::kFree;  // set by the caller later; the hand must not take it
                                             // again
    s.taken[count++] = static_cast<int32_t>(slot);
  }
  return count;
}

void FreeSlot(const ResidencyState& s, int64_t slot) {
  s.slot_pages[slot] = -1;
  s.slot_states[slot] = SlotState::kFree;
  s.free_bits[slot / kWordBits] |= 1u << (slot % kWordBits);
  ++s.counters->free_slots;
}

// Counts the step's accesses and marks candidates.
void ScanPages(const ResidencyState& s, uint32_t step) {
  std::fill_n(s.candidate_bits, s.shape.num_chunks() * kChunkWords, 0);
  std::fill_n(s.chunk_counts, s.shape.num_chunks(), 0);
  for (int64_t page = 0; page < s.shape.num_pages(); ++page) {
    const PageTier tier = s.pages[page].tier();
    if (s.last_touched[page] == step) {
      ++(tier == PageTier::kDevice ? s.counters->hits : s.counters->misses);
    }
    uint32_t& missed = s.missed_bytes[page];
    if (missed >= s.shape.page_bytes && tier == PageTier::kHost) {
      s.candidate_bits[page / kWordBits] |= 1u << (page % kWordBits);
      ++s.chunk_counts[page / kChunkPages];
    }
    missed -= missed >> kMissDecayShift;
  }
}

// Lists the first candidates, from the cursor's chunk on. Returns their number.
int64_t ListCandidates(const ResidencyState& s) {
  const int64_t words = s.shape.num_chunks() * kChunkWords;
  int64_t count = 0;
  for (int64_t i = 0; i < words; ++i) {
    const int64_t word = (s.counters->cursor * kChunkWords + i) % words;
    for (uint32_t bits = s.candidate_bits[word]; bits != 0; bits &= bits - 1) {
      if (count == s.shape.max_fills) return count;
      s.candidates[count++] = static_cast<int32_t>(word * kWordBits + std::countr_zero(bits));
    }
  }
  return count;
}

// Enters the first candidates and the slots taken for them.
void EnterFills(const ResidencyState& s, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    s.fills[i] = {.page = s.candidates[i], .slot = s.taken[i]};
    s.slot_states[s.taken[i]] = SlotState::kFilling;
  }
  s.counters->num_fills = count;
}

}  // namespace

void InitResidency(const ResidencyState& s) {
  *s.counters = {.free_slots = s.shape.num_slots};
  for (int64_t page = 0; page < s.shape.num_pages(); ++page) {
    s.pages[page] = PageRef();
    s.last_touched[page] = kNeverTouched;
    s.missed_bytes[page] = 0;
  }
  for (int64_t word = 0; word < s.shape.num_free_words(); ++word) s.free_bits[word] = 0;
  for (int64_t slot = 0; slot < s.shape.num_slots; ++slot) {
    s.slot_pages[slot] = -1;
    s.slot_states[slot] = SlotState::kFree;
    s.slot_seen[slot] = 0;
    s.free_bits[slot / kWordBits] |= 1u << (slot % kWordBits);
  }
}

void OpenExtents(const ResidencyState& s, std::span<const int32_t> extents) {
  const int64_t wanted = std::ssize(extents) * s.shape.pages_per_extent;
  // Two rounds: the first records reads, the second finds pages not read since.
  const int64_t taken = TakeSlots(s, wanted, Spared(), 2 * s.shape.num_slots);
  for (int64_t i = 0; i < wanted; ++i) {
    const int64_t page =
        extents[static_cast<size_t>(i / s.shape.pages_per_extent)] * s.shape.pages_per_extent +
        i % s.shape.pages_per_extent;
    s.last_touched[page] = kNeverTouched;
    s.missed_bytes[page] = 0;
    if (i >= taken) {
      ++s.counters->without_room;
      continue;
    }
    const int32_t slot = s.taken[i];
    s.pages[page] = PageRef(s.shape.slot_memory(slot), PageTier::kDevice);
    s.slot_pages[slot] = static_cast<int32_t>(page);
    s.slot_states[slot] = SlotState::kPinned;
    s.slot_seen[slot] = 0;
  }
}

void CopyExtentsToHost(const ResidencyState& s, std::span<const int32_t> extents) {
  for (const int64_t extent : extents) {
    for (int64_t page = extent * s.shape.pages_per_extent;
         page < (extent + 1) * s.shape.pages_per_extent; ++page) {
      if (s.pages[page].tier() != PageTier::kDevice) continue;
      std::memcpy(s.shape.host_page(page), s.pages[page].page(),
                  static_cast<size_t>(s.shape.page_bytes));
    }
  }
}

void SealExtents(const ResidencyState& s, std::span<const int32_t> extents) {
  for (const int64_t extent : extents) {
    for (int64_t i = 0; i < s.shape.pages_per_extent; ++i) {
      const PageRef page = s.pages[extent * s.shape.pages_per_extent + i];
      if (page.tier() != PageTier::kDevice) continue;
      s.slot_states[s.shape.slot_of(page.page())] = SlotState::kCached;
    }
  }
}

void RestoreExtents(const ResidencyState& s, std::span<const int32_t> extents) {
  for (const int64_t extent : extents) {
    for (int64_t page = extent * s.shape.pages_per_extent;
         page < (extent + 1) * s.shape.pages_per_extent; ++page) {
      s.pages[page] = s.shape.home(page);
      s.last_touched[page] = kNeverTouched;
      s.missed_bytes[page] = 0;
    }
  }
}

void FreeExtents(const ResidencyState& s, std::span<const int32_t> extents) {
  for (const int64_t extent : extents) {
    for (int64_t i = 0; i < s.shape.pages_per_extent; ++i) {
      PageRef& page = s.pages[extent * s.shape.pages_per_extent + i];
      if (page.tier() == PageTier::kDevice) FreeSlot(s, s.shape.slot_of(page.page()));
      page = PageRef();
    }
    for (int64_t i = 0; i < s.counters->num_fills; ++i) {
      if (s.fills[i].page / s.shape.pages_per_extent == extent) s.fills[i].given_up = 1;
    }
  }
}

void MapFills(const ResidencyState& s) {
  for (int64_t i = 0; i < s.counters->num_fills; ++i) {
    const PageFill fill = s.fills[i];
    if (fill.given_up != 0) {
      FreeSlot(s, fill.slot);
      ++s.counters->given_up;
      continue;
    }
    s.pages[fill.page] = PageRef(s.shape.slot_memory(fill.slot), PageTier::kDevice);
    s.missed_bytes[fill.page] = 0;
    s.slot_pages[fill.slot] = fill.page;
    s.slot_states[fill.slot] = SlotState::kCached;
    s.slot_seen[fill.slot] = 0;
    ++s.counters->promotions;
  }
  s.counters->num_fills = 0;
}

void PlanFills(const ResidencyState& s, uint32_t step) {
  ScanPages(s, step);
  const int64_t wanted = ListCandidates(s);
  const int64_t taken = TakeSlots(s, wanted, {.step = step}, s.shape.max_examined);
  EnterFills(s, taken);
  // If room or the step's fills ran out, the next step continues after that chunk.
  if (taken > 0 && (taken == s.shape.max_fills || taken < wanted)) {
    s.counters->cursor = (s.candidates[taken - 1] / kChunkPages + 1) % s.shape.num_chunks();
  }
}

void PlanPromotion(const ResidencyState& s, std::span<const int32_t> extents,
                   std::span<const uint8_t> running, uint32_t step) {
  int64_t wanted = 0;
  for (const int64_t extent : extents) {
    for (int64_t page = extent * s.shape.pages_per_extent;
         page < (extent + 1) * s.shape.pages_per_extent; ++page) {
      s.last_touched[page] = step - 1;
      if (s.pages[page].tier() != PageTier::kHost || wanted == s.shape.num_slots) continue;
      s.candidates[wanted++] = static_cast<int32_t>(page);
    }
  }
  const Spared spared = {.step = FirstRecentStep(step), .running = running};
  EnterFills(s, TakeSlots(s, wanted, spared, 2 * s.shape.num_slots));
}

void CopyFills(const ResidencyState& s) {
  for (int64_t i = 0; i < s.counters->num_fills; ++i) {
    std::memcpy(s.shape.slot_memory(s.fills[i].slot), s.shape.host_page(s.fills[i].page),
                static_cast<size_t>(s.shape.page_bytes));
  }
}

void SurveyExtents(const ResidencyState& s, std::span<ExtentUse> uses) {
  for (int64_t extent = 0; extent < s.shape.num_blocks(); ++extent) {
    ExtentUse use;
    const int64_t first = extent * s.shape.pages_per_extent;
    for (int64_t page = first; page < first + s.shape.pages_per_extent; ++page) {
      use.device_pages += s.pages[page].tier() == PageTier::kDevice ? 1 : 0;
      if (s.last_touched[page] == kNeverTouched) continue;
      use.last_read = std::max(use.last_read, s.last_touched[page]);
    }
    uses[static_cast<size_t>(extent)] = use;
  }
}

}  // namespace kvasir::kernels
