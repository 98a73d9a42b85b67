// Places of the pages of blocks: in slots of the device tier, or in place in the host tier. The
// store knows blocks, their ids and handles, and the tier below. It tells the residency which of
// its extents hold open blocks, sealed ones or none, and which extent is which block of a sequence
// slot, and asks it for the tables of a step. The residency hides memory of both tiers, page
// tables, promotion, eviction, checksums between the two. An extent is a block's place in the host
// tier, and its index in the tables. On the CPU it is an ArenaResidency; a backend with a device
// brings its own.
//
//   none --Open--> open: all pages in the device tier, pinned --Seal--> sealed: in the host tier,
//   none --Restore--> sealed                                            single pages cached
//   any  --Free--> none
//
// Only const functions may be called between BeginStep and EndStep. Thread-compatible.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/base/status_macros.h"
#include "kernels/paged/paged_kv.h"
#include "kvstore/format/block.h"
#include "kvstore/format/page_format.h"
#include "kvstore/host/freed_memory.h"
#include "kvstore/host/host_memory.h"
#include "kvstore/host/host_slab.h"

namespace kvasir::kvstore {

struct ResidencyOptions {
  ExtentFormat format;
  HostMemory& memory;       // of the extents; outlives the residency
  int64_t num_extents = 0;  // blocks: extents of the host tier
  int64_t device_pages = 0;
  int64_t num_slots = 0;
  int64_t max_blocks_per_slot = 0;
  bool key_codes = false;
  FreedMemory freed_memory = FreedMemory::kAsIs;
  // Memory for the key bounds of lean blocks (kvstore/on_demand/), whose indices follow those of
  // the extents. Empty: there are none.
  std::vector<std::byte*> lean_bounds = {};
  int64_t page_cache_bytes = 0;  // that the store has taken for single pages of lean blocks
};

// An extent with a page whose bytes differ from those sealed.
struct CorruptExtent {
  int64_t extent = 0;
  // DATA_LOSS: which page, what was expected and found; another code: it cannot be read.
  absl::Status status;
};

// Counters since the start, except the first. Pages unless said otherwise.
struct ResidencyStats {
  int64_t device_pages_used = 0;  // now
  int64_t promotions = 0;
  int64_t evictions = 0;
  int64_t bytes_host_to_device = 0;
  int64_t bytes_device_to_host = 0;
  int64_t checksum_failures = 0;
  int64_t device_hits = 0;
  int64_t device_misses = 0;
};

class PageResidency {
 public:
  virtual ~PageResidency() = default;

  // The store takes and frees its extents.
  virtual HostSlab& host() = 0;

  // --- extents, between steps

  // Waits until a taken extent may be touched: the store may serve while memory of the
  // host tier is still being prepared. RESOURCE_EXHAUSTED if that fails.
  virtual absl::Status AwaitExtent(int64_t /*extent*/) { return absl::OkStatus(); }
  // Whether AwaitExtent would not wait.
  virtual bool IsExtentThere(int64_t /*extent*/) { return true; }

  // REQUIRES: openable_pages() - pinned_pages() is at least one block's pages.
  virtual absl::Status Open(int64_t extent) = 0;
  // `hash` names the block, and with it the checksums of its pages.
  virtual absl::Status Seal(int64_t extent, const PrefixHash& hash) = 0;
  // Whether Seal leaves the extent whole, so that IsExtentWhole need not be asked later.
  virtual bool SealsAtOnce() const { return false; }
  // Whether a sealed extent is complete in host memory, checksums and bounds included,
  // except its header. Otherwise it is being copied, or its checksums are being made.
  virtual absl::StatusOr<bool> IsExtentWhole(int64_t extent) = 0;
  // Called when the extent has come whole from the tier below.
  virtual void Restore(int64_t extent, const PrefixHash& hash) = 0;
  // Makes a lean block of the one in extent `from`, or of one whose bounds have come from disk: its
  // pages are absent, its key codes are those of `from`. REQUIRES: the residency has lean blocks.
  virtual void MakeLean(int64_t /*lean*/, const PrefixHash& /*hash*/,
                        std::optional<int64_t> /*from*/) {
    KVASIR_CHECK(false);
  }
  // Step of the last read of a page of it, 0 if there was none.
  virtual uint32_t LastRead(int64_t /*extent*/) const { return 0; }
  // REQUIRES: the extent is bound nowhere.
  virtual void Free(int64_t extent) = 0;
  // Makes `extent` block `index` of the slot; -1: there is none.
  virtual void Bind(int64_t slot, int64_t index, int64_t extent) = 0;
  virtual int64_t BoundExtent(int64_t slot, int64_t index) const = 0;
  // Brings the extent's pages from the host tier into the device tier before the next step's
  // kernels run, as KvStore::Promote says. Does nothing for blocks that are not sealed or are lean,
  // and where kernels read both tiers equally fast.
  virtual void Promote(int64_t /*extent*/) {}
  // Number of the extent's pages in the device tier.
  virtual int64_t PagesInDevice(int64_t extent) const = 0;

  // --- steps

  // Returns tables for the kernels of one step, valid until EndStep. `binds_lean`: lean blocks are
  // bound, whose pages the kernels may ask for until EndStep.
  virtual absl::StatusOr<kernels::PagedKv> BeginStep(uint32_t step, bool binds_lean) = 0;
  // Collects accesses and misses, promotes, evicts. Returns the extents found corrupt, each once.
  virtual absl::StatusOr<std::vector<CorruptExtent>> EndStep() = 0;

  // No step runs any more, and none will: pages of lean blocks are not asked for after the call.
  virtual void EndSteps() {}

  virtual int64_t device_pages() const = 0;
  // Pages of the device tier that open blocks may have at a time.
  virtual int64_t openable_pages() const { return device_pages(); }
  virtual int64_t pinned_pages() const = 0;  // of open extents
  virtual ResidencyStats stats() const = 0;
  // Checks that free, used and pinned add up, and that every page is where its extent's state says.
  // INTERNAL with the discrepancy.
  virtual absl::Status CheckIntegrity() const = 0;
};

// RESOURCE_EXHAUSTED when there is no memory.
using ResidencyMaker =
    std::function<absl::StatusOr<std::unique_ptr<PageResidency>>(const ResidencyOptions&)>;

}  // namespace kvasir::kvstore
