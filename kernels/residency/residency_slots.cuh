// Slots of the device tier, taken by one CTA in an order that does not depend on timing: free ones
// first, then those that CLOCK's hand finds. A window of entries at a time: each thread examines
// one entry, a sum over the threads gives the entry its place, and entries after the last wanted
// one stay unchanged. So the state equals that of residency_cpu.cc. All threads of the CTA call the
// functions that take an OrderMemory.
#pragma once

#include <cstdint>

#include "kernels/base/block_sums.cuh"
#include "kernels/base/warp.cuh"
#include "kernels/residency/residency.h"
#include "kernels/residency/residency_launch.cuh"

namespace kvasir::kernels {

inline constexpr int kOrderThreads = 1024;  // of a CTA that keeps an order

struct OrderMemory {
  uint64_t sums[kOrderThreads / kWarpThreads];
  int64_t total;
  int64_t passed;
};

inline __device__ void AddTo(int64_t* counter, int64_t value) {
  atomicAdd(reinterpret_cast<unsigned long long*>(counter), static_cast<unsigned long long>(value));
}

// Returns the number of things of all threads before this one, which has `count`. Sets memory.total
// to the sum over all threads.
inline __device__ int64_t PlaceOf(int64_t count, OrderMemory& memory) {
  const auto before = static_cast<int64_t>(SumBefore(static_cast<uint64_t>(count), memory.sums));
  if (Thread() == NumThreads() - 1) memory.total = before + count;
  __syncthreads();
  return before;
}

// Puts up to `wanted` slots into `taken`: the first free ones.
inline __device__ int64_t TakeFree(const ResidencyState& s, int64_t wanted, OrderMemory& memory) {
  const int64_t most = min(wanted, s.counters->free_slots);
  int64_t count = 0;
  for (int64_t first = 0; count < most; first += NumThreads()) {
    const int64_t index = first + Thread();
    const uint32_t word = index < s.shape.num_free_words() ? s.free_bits[index] : 0;
    uint32_t rest = word;
    int64_t place = count + PlaceOf(__popc(word), memory);
    for (; rest != 0 && place < most; rest &= rest - 1, ++place) {
      const int bit = __ffs(static_cast<int>(rest)) - 1;
      s.taken[place] = static_cast<int32_t>(index * kWordBits + bit);
    }
    if (rest != word) s.free_bits[index] = rest;
    count = min(most, count + memory.total);
  }
  __syncthreads();
  if (Thread() == 0) s.counters->free_slots -= count;
  return count;
}

enum class Verdict { kStays, kLeaves, kStaysOnce };

// Pages that must not be evicted: those read in step `step` or later, of the blocks that `running`
// ([num_blocks]) marks, or of all if it is null; and those that call `call` of BringPages needs.
struct Spared {
  uint32_t step = kNeverTouched;
  const uint8_t* running = nullptr;
  uint32_t call = 0;  // calls begin at 1
};

inline __device__ bool IsNeeded(const ResidencyState& s, int64_t page, uint32_t call) {
  return call != 0 && page >= s.shape.first_lean_page() &&
         s.needed_in[page - s.shape.first_lean_page()] == call;
}

inline __device__ Verdict Judge(const ResidencyState& s, int64_t slot, const Spared& spared) {
  if (s.slot_states[slot] != SlotState::kCached) return Verdict::kStays;
  if (IsNeeded(s, s.slot_pages[slot], spared.call)) return Verdict::kStays;
  const uint32_t touched = s.last_touched[s.slot_pages[slot]];
  if (touched == kNeverTouched) return Verdict::kLeaves;
  const bool runs = spared.running == nullptr ||
                    spared.running[s.slot_pages[slot] / s.shape.pages_per_extent] != 0;
  if (runs && touched >= spared.step) return Verdict::kStays;
  return touched <= s.slot_seen[slot] ? Verdict::kLeaves : Verdict::kStaysOnce;
}

inline __device__ void Evict(const ResidencyState& s, int64_t slot) {
  const int64_t page = s.slot_pages[slot];
  s.pages[page] = s.shape.home(page);
  s.slot_pages[slot] = -1;
  s.slot_states[slot] = SlotState::kFree;
}

// Appends victims among the next `most_examined` slots to the `count` slots already taken. Returns
// the new count.
inline __device__ int64_t TakeVictims(const ResidencyState& s, int64_t count, int64_t wanted,
                                      const Spared& spared, int64_t most_examined,
                                      OrderMemory& memory) {
  const int64_t had = count;
  int64_t hand = s.counters->hand;
  for (int64_t examined = 0; examined < most_examined && count < wanted;) {
    const int64_t window = min(min(NumThreads(), most_examined - examined), s.shape.num_slots);
    const int64_t slot = (hand + Thread()) % s.shape.num_slots;
    const Verdict verdict = Thread() < window ? Judge(s, slot, spared) : Verdict::kStays;
    const bool leaves = verdict == Verdict::kLeaves;
    const int64_t place = count + PlaceOf(leaves ? 1 : 0, memory);
    if (Thread() == 0) memory.passed = window;
    __syncthreads();
    if (leaves && place == wanted - 1) memory.passed = Thread() + 1;
    __syncthreads();
    const int64_t passed = memory.passed;
    if (Thread() < passed && leaves) {
      Evict(s, slot);
      s.taken[place] = static_cast<int32_t>(slot);
    } else if (Thread() < passed && verdict == Verdict::kStaysOnce) {
      s.slot_seen[slot] = s.last_touched[s.slot_pages[slot]];
    }
    count = min(wanted, count + memory.total);
    hand = (hand + passed) % s.shape.num_slots;
    examined += passed;
    __syncthreads();
  }
  if (Thread() == 0) {
    s.counters->hand = hand;
    s.counters->evictions += count - had;
  }
  return count;
}

inline __device__ int64_t TakeSlots(const ResidencyState& s, int64_t wanted, const Spared& spared,
                                    int64_t most_examined, OrderMemory& memory) {
  const int64_t free = TakeFree(s, wanted, memory);
  const int64_t taken = TakeVictims(s, free, wanted, spared, most_examined, memory);
  __syncthreads();
  return taken;
}

inline __device__ void EnterSlot(const ResidencyState& s, int64_t page, int64_t slot,
                                 SlotState state) {
  s.pages[page] = PageRef::OfAligned(s.shape.slot_memory(slot), PageTier::kDevice);
  s.missed_bytes[page] = 0;
  s.slot_pages[slot] = static_cast<int32_t>(page);
  s.slot_states[slot] = state;
  s.slot_seen[slot] = 0;
}

// Does not count the slot as free; the caller does.
inline __device__ void FreeSlot(const ResidencyState& s, int64_t slot) {
  s.slot_pages[slot] = -1;
  s.slot_states[slot] = SlotState::kFree;
  atomicOr(&s.free_bits[slot / kWordBits], 1u << (slot % kWordBits));
}

}  // namespace kvasir::kernels
