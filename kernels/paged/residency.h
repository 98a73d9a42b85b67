// The residency protocol: the device tier is a cache of pages over the host tier, and everything
// about it lies in the memory of the device: page table, slots, what moves next. The host says
// which rows (blocks) were opened, sealed and freed, and counts what it gave out; in the steady
// decode loop it says nothing and is asked nothing. The reference of all ops, for state in host
// memory, is residency_cpu.cc; the ops on the GPU (residency_cuda.h) leave the same state, entry by
// entry.
//
//   row:   none --OpenRows--> open --SealRows--> sealed, none --RestoreRows--> sealed,
//          any --FreeRows--> none
//   slot:  free --OpenRows--> pinned --SealRows--> cached --evicted, FreeRows--> free
//          free, or cached and evicted --PlanFills--> filling --MapFills--> cached
//
// A step reads tables that nothing changes while it runs. Behind it:
//   MapFills   the pages that were filled meanwhile get into the tables
//   PlanFills  pages that missed more than their size are chosen, and slots for them: free ones,
//              then those of pages that the step did not read, by CLOCK. Victims leave the tables.
//   CopyFills  beside the next step: into slots that no table names
// So no slot is named by a table and written at once, and one table is enough.
//
// Ops run one after another, but for CopyFills, which may run beside anything but MapFills and
// PlanFills. Functions without state; the state is the caller's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/status.h"

#include "kernels/base/host_device.h"
#include "kernels/paged/paged_kv.h"

namespace kvasir::kernels {

// Of PlanFills' scan.
inline constexpr int64_t kChunkPages = 4096;
inline constexpr int64_t kWordBits = 32;
inline constexpr int64_t kChunkWords = kChunkPages / kWordBits;
// What is left of a page's missed bytes after each step: 7/8, so misses of some ten steps add up.
inline constexpr uint32_t kMissDecayShift = 3;

struct ResidencyShape {
  int64_t num_rows = 0;
  int64_t pages_per_row = 0;
  int64_t num_slots = 0;  // at least two rows' pages
  int64_t page_bytes = 0;
  std::byte* arena = nullptr;  // [num_slots] pages
  // Pages of row r, in order, begin at extents + r * extent_stride; readable by the device.
  std::byte* extents = nullptr;
  int64_t extent_stride = 0;
  int64_t max_fills = 0;     // of one step
  int64_t max_examined = 0;  // slots that a step looks at in search of victims

  KVASIR_HOST_DEVICE int64_t num_pages() const { return num_rows * pages_per_row; }
  KVASIR_HOST_DEVICE int64_t num_chunks() const {
    return (num_pages() + kChunkPages - 1) / kChunkPages;
  }
  KVASIR_HOST_DEVICE int64_t num_free_words() const {
    return (num_slots + kWordBits - 1) / kWordBits;
  }
  KVASIR_HOST_DEVICE std::byte* slot_memory(int64_t slot) const {
    return arena + slot * page_bytes;
  }
  KVASIR_HOST_DEVICE int64_t slot_of(const std::byte* memory) const {
    return (memory - arena) / page_bytes;
  }
  KVASIR_HOST_DEVICE std::byte* host_page(int64_t page) const {
    return extents + page / pages_per_row * extent_stride + page % pages_per_row * page_bytes;
  }
};

enum class SlotState : uint8_t { kFree, kPinned, kCached, kFilling };

struct PageFill {
  int32_t page = 0;
  int32_t slot = 0;
  int32_t given_up = 0;  // its row was freed: the slot becomes free when the copy is over
};

// Of all steps, but for what is said to be of now. Pages.
struct ResidencyCounters {
  int64_t hits = 0;    // read in the device tier; once a step
  int64_t misses = 0;  // read in place from the host tier
  int64_t promotions = 0;
  int64_t evictions = 0;
  int64_t given_up = 0;      // fills whose row was freed
  int64_t without_room = 0;  // of opened rows: the caller gave out more than there is
  int64_t free_slots = 0;    // now
  int64_t num_fills = 0;     // now
  int64_t hand = 0;          // the slot that CLOCK looks at next
  int64_t cursor = 0;        // the chunk where PlanFills begins
};

// All in one block of memory on the side of the ops that are called.
struct ResidencyState {
  ResidencyShape shape;
  PageRef* pages = nullptr;            // [num_pages], as PagedKv has it
  uint32_t* last_touched = nullptr;    // [num_pages], of the access record
  uint32_t* missed_bytes = nullptr;    // [num_pages], likewise
  int32_t* slot_pages = nullptr;       // [num_slots] the page in it, -1 unless pinned or cached
  SlotState* slot_states = nullptr;    // [num_slots]
  uint32_t* slot_seen = nullptr;       // [num_slots] last read that CLOCK's hand knows of
  uint32_t* free_bits = nullptr;       // [num_free_words] bit s % 32 of word s / 32: free
  PageFill* fills = nullptr;           // [max_fills]
  int32_t* taken = nullptr;            // [num_slots] working memory
  int32_t* candidates = nullptr;       // [max_fills] likewise
  uint32_t* candidate_bits = nullptr;  // [num_chunks * kChunkPages / 32] likewise
  int32_t* chunk_counts = nullptr;     // [num_chunks] likewise
  ResidencyCounters* counters = nullptr;
  int64_t bytes = 0;
};

// INVALID_ARGUMENT for shapes whose numbers do not fit the tables.
absl::Status CheckResidencyShape(const ResidencyShape& shape);

// The state in `memory`, with unspecified contents; null: only `bytes` is of use.
ResidencyState LayOutResidency(const ResidencyShape& shape, std::byte* memory);

// Nothing is open, all slots are free. What each op does to state in host memory:
void InitResidency(const ResidencyState& state);
// Each row gets slots for all its pages, pinned: the first free ones, then by eviction. REQUIRES:
// the rows are free, and no more than num_slots slots are pinned or filling then; pages without a
// slot stay absent and are counted.
void OpenRows(const ResidencyState& state, std::span<const int32_t> rows);
// Copies the rows' pages to the host tier. REQUIRES: they are open.
void CopyRowsToHost(const ResidencyState& state, std::span<const int32_t> rows);
// Their pages may be evicted from now on.
void SealRows(const ResidencyState& state, std::span<const int32_t> rows);
// Their pages lie in the host tier and were never read. REQUIRES: the rows are free.
void RestoreRows(const ResidencyState& state, std::span<const int32_t> rows);
// REQUIRES: the rows are open or sealed, and none is named twice.
void FreeRows(const ResidencyState& state, std::span<const int32_t> rows);
// REQUIRES: CopyFills is over.
void MapFills(const ResidencyState& state);
// Behind step `step`; counts its hits and misses. REQUIRES: MapFills.
void PlanFills(const ResidencyState& state, uint32_t step);
void CopyFills(const ResidencyState& state);
// How many pages of each row are in the device tier, to `counts`: [num_rows].
void CountDevicePages(const ResidencyState& state, std::span<int32_t> counts);

}  // namespace kvasir::kernels
