// The residency protocol: the device tier is a cache of pages over the host tier. All its state
// lies in device memory: page table, slots, planned moves. The host names the extents (blocks) that
// were opened, sealed and freed, and counts the extents it gave out. In the steady decode loop it
// neither sends nor asks anything. residency_cpu.cc is the reference of all ops, for state in host
// memory. The ops on the GPU (residency_cuda.h) leave the same state, entry by entry.
//
//   extent:   none --OpenExtents--> open --SealExtents--> sealed, none --RestoreExtents--> sealed,
//          any --FreeExtents--> none
//   slot:  free --OpenExtents--> pinned --SealExtents--> cached --evicted, FreeExtents--> free
//          free, or cached and evicted --PlanFills, PlanPromotion--> filling --MapFills--> cached
//          free, or cached and evicted --BringPages--> cached
//
// Nothing changes the tables while a step reads them. After the step:
//   MapFills   enters the pages that were filled meanwhile into the tables
//   PlanFills  chooses pages that missed as much as their size (one read of all tokens is enough),
//              and slots for them: free slots first, then those of pages that the step did not
//              read, by CLOCK. Victims leave the tables.
//   CopyFills  copies beside the next step, into slots that no table names
// So no slot is both named by a table and written, and one table is enough.
// Before a step whose kernels would read pages of the host tier again and again, PlanPromotion,
// CopyFills and MapFills bring them: read once over the link, as many as find slots.
//
// Blocks whose pages lie on disk only (lean blocks, kvstore/on_demand/) follow the extents in the
// tables. Their pages are absent, or in the device tier: a step that needs an absent one brings it
// between selection and attention (bring_pages_cuda.h).
//
// Ops run one after another, except that CopyFills may run beside all ops other than MapFills,
// PlanFills and PlanPromotion. The functions are stateless: the caller owns the state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/status.h"

#include "kernels/base/host_device.h"
#include "kernels/paged/paged_kv.h"

namespace kvasir::kernels {

// Units of PlanFills' scan.
inline constexpr int64_t kChunkPages = 4096;
inline constexpr int64_t kWordBits = 32;
inline constexpr int64_t kChunkWords = kChunkPages / kWordBits;
// Each step leaves 7/8 of a page's missed bytes, so the misses of about ten steps add up.
inline constexpr uint32_t kMissDecayShift = 3;
// PlanPromotion evicts nothing that a running sequence has and that was read in one of that many
// steps before.
inline constexpr uint32_t kRecentSteps = 8;

// The first of the recent steps before step `step`.
KVASIR_HOST_DEVICE inline uint32_t FirstRecentStep(uint32_t step) {
  return step > kRecentSteps ? step - kRecentSteps : 0;
}

struct ResidencyShape {
  int64_t num_extents = 0;
  int64_t pages_per_extent = 0;
  int64_t num_slots = 0;  // at least the pages of two extents
  int64_t page_bytes = 0;
  std::byte* arena = nullptr;  // [num_slots] pages
  // Pages of extent e, in order, begin at extents + e * extent_stride. Readable by the device.
  std::byte* extents = nullptr;
  int64_t extent_stride = 0;
  int64_t num_lean = 0;      // blocks after the extents, whose pages lie on disk
  int64_t max_fills = 0;     // of PlanFills, in one step
  int64_t max_examined = 0;  // slots that PlanFills examines for victims

  KVASIR_HOST_DEVICE int64_t num_blocks() const { return num_extents + num_lean; }
  KVASIR_HOST_DEVICE int64_t num_pages() const { return num_blocks() * pages_per_extent; }
  KVASIR_HOST_DEVICE int64_t first_lean_page() const { return num_extents * pages_per_extent; }
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
    return extents + page / pages_per_extent * extent_stride + page % pages_per_extent * page_bytes;
  }
  // Where a page of a sealed block is read when it is not in the device tier.
  KVASIR_HOST_DEVICE PageRef home(int64_t page) const {
    if (page >= first_lean_page()) return PageRef();
    return PageRef::OfAligned(host_page(page), PageTier::kHost);
  }
};

enum class SlotState : uint8_t { kFree, kPinned, kCached, kFilling };

struct PageFill {
  int32_t page = 0;
  int32_t slot = 0;
  int32_t given_up = 0;  // its extent was freed: the slot becomes free when the copy ends
};

// Page counts since the start, unless marked "now".
struct ResidencyCounters {
  int64_t hits = 0;    // read in the device tier, counted once a step
  int64_t misses = 0;  // read in place from the host tier
  int64_t promotions = 0;
  int64_t evictions = 0;
  int64_t given_up = 0;  // fills whose extent was freed
  int64_t without_room =
      0;                   // pages of opened extents that got no slot: the caller gave out too many
  int64_t free_slots = 0;  // now
  int64_t num_fills = 0;   // now
  int64_t hand = 0;        // the slot that CLOCK examines next
  int64_t cursor = 0;      // the chunk where PlanFills begins
};

// Kept by BringPages between its calls; zero at first.
struct BringState {
  uint32_t calls = 0;
  uint32_t requests = 0;   // to the host: calls with absent pages
  uint64_t tickets = 0;    // pages of all requests
  int32_t num_absent = 0;  // of the call that runs
  uint32_t ended_blocks = 0;
};
// A page that is asked for, and the sequence slot that waits for it.
struct AskedPage {
  int32_t page = 0;
  int32_t slot = 0;
};

struct ExtentUse {
  int32_t device_pages = 0;  // in the device tier
  uint32_t last_read = 0;    // step of the last read of a page; 0: there was none
};

// All arrays lie in one allocation, in the memory of the ops that use it.
struct ResidencyState {
  ResidencyShape shape;
  PageRef* pages = nullptr;            // [num_pages], as PagedKv has it
  uint32_t* last_touched = nullptr;    // [num_pages], of the access record
  uint32_t* missed_bytes = nullptr;    // [num_pages], likewise
  int32_t* slot_pages = nullptr;       // [num_slots] the slot's page, or -1 unless pinned or cached
  SlotState* slot_states = nullptr;    // [num_slots]
  uint32_t* slot_seen = nullptr;       // [num_slots] last read that CLOCK's hand has seen
  uint32_t* free_bits = nullptr;       // [num_free_words] bit s % 32 of word s / 32: free
  PageFill* fills = nullptr;           // [num_slots]
  int32_t* taken = nullptr;            // [num_slots] working memory
  int32_t* candidates = nullptr;       // [num_slots] working memory
  uint32_t* candidate_bits = nullptr;  // [num_chunks * kChunkPages / 32] working memory
  int32_t* chunk_counts = nullptr;     // [num_chunks] working memory
  BringState* bring = nullptr;         // null without lean blocks, like the arrays below
  uint32_t* needed_in = nullptr;       // [pages of lean blocks] last call that needed the page
  AskedPage* absent = nullptr;         // [pages of lean blocks] working memory
  ResidencyCounters* counters = nullptr;
  int64_t bytes = 0;
};

// INVALID_ARGUMENT for a shape whose numbers do not fit the tables.
absl::Status CheckResidencyShape(const ResidencyShape& shape);

// Returns the state in `memory`, with unspecified contents. With null memory only `bytes` is valid.
ResidencyState LayOutResidency(const ResidencyShape& shape, std::byte* memory);

// The ops on state in host memory. InitResidency opens no extent and frees all slots.
void InitResidency(const ResidencyState& state);
// Gives each extent pinned slots for all its pages, in order: first the free slots, then evicted
// ones. REQUIRES: the extents are free, and at most num_slots slots are then pinned or filling.
// Pages without a slot stay absent and are counted.
void OpenExtents(const ResidencyState& state, std::span<const int32_t> extents);
// Copies the extents' pages to the host tier. REQUIRES: the extents are open.
void CopyExtentsToHost(const ResidencyState& state, std::span<const int32_t> extents);
// Allows eviction of the extents' pages.
void SealExtents(const ResidencyState& state, std::span<const int32_t> extents);
// Makes sealed extents of pages that lie in the host tier and were never read. REQUIRES: the
// extents are free.
void RestoreExtents(const ResidencyState& state, std::span<const int32_t> extents);
// REQUIRES: the extents are open or sealed, and no extent is named twice.
void FreeExtents(const ResidencyState& state, std::span<const int32_t> extents);
// REQUIRES: CopyFills has ended.
void MapFills(const ResidencyState& state);
// Runs after step `step` and counts its hits and misses. REQUIRES: MapFills has run.
void PlanFills(const ResidencyState& state, uint32_t step);
// Chooses all pages of the sealed extents that lie in the host tier, in order, and slots for them:
// free ones, then others by CLOCK, but for those of pages of `running` blocks ([num_blocks], 0 or
// 1; the extents are among them) that one of the last kRecentSteps steps before step `step` read.
// The extents' pages count as read by the step before. REQUIRES: step `step` has not begun,
// MapFills has run, and no extent is named twice.
void PlanPromotion(const ResidencyState& state, std::span<const int32_t> extents,
                   std::span<const uint8_t> running, uint32_t step);
void CopyFills(const ResidencyState& state);
// Writes how each block is used to `uses`: [num_blocks]. What is said of free ones means nothing.
void SurveyExtents(const ResidencyState& state, std::span<ExtentUse> uses);

}  // namespace kvasir::kernels
