// The tiered KV store of one worker: the door to kvstore/. It owns every byte of K and V of its
// rank and decides where each lies: in the device tier (HBM, or a bounded arena on the CPU) or in
// the host tier. The engine opens, seals and drops blocks as the coordinator's plans say, binds
// them to sequence slots, and gives kernels the tables of a step; it never sees an address. Hidden
// behind it: arenas, page tables, eviction, promotion, checksums.
//
// Life of a block:  Open -> (pages written in the device tier over some steps) -> Seal ->
// immutable, host tier holds all of it, the device tier caches single pages -> Drop (no longer
// kept) and last handle gone -> freed. A block that was never sealed is freed with its last handle.
//
// Residency changes only at step boundaries: tables are constant between BeginStep and EndStep, and
// nothing else may be called between them but const functions; handles may go. A page read in place
// from the host tier is a miss; it is promoted when the bytes missed in it over the last steps
// exceed its size. Pages of open blocks are pinned in the device tier; the host tier includes every
// sealed block, so eviction writes nothing back.
//
// Every page is verified against the checksum made by Seal when it enters the device tier. A page
// that fails quarantines its block (see TakeCorrupt). Pages that are read in place rely on the
// memory's own error correction between two promotions.
// Thread-compatible: the engine's thread only, which also destroys the handles; the store outlives
// them.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "kernels/paged/paged_kv.h"
#include "kvstore/block.h"
#include "kvstore/tiers/freed_memory.h"

namespace kvasir::kvstore {

struct KvStoreOptions {
  kernels::KvLayout layout;
  int64_t device_bytes = 0;  // rounded down to whole pages; at least two blocks
  int64_t host_bytes = 0;    // rounded down to whole extents (page_format.h); at least two blocks
  int64_t num_slots = 0;
  int64_t max_blocks_per_slot = 0;
  // Whose KV it is: checksums are bound to the place in the model.
  std::string weights_hash = {};
  std::string kv_form = {};
  int64_t first_layer = 0;
  int64_t first_head = 0;
  // kPoisoned in tests: stale reads show as NaN.
  FreedMemory freed_memory = FreedMemory::kAsIs;
};

// A block whose bytes are not what was sealed: whatever was computed from it may be wrong.
struct CorruptBlock {
  BlockId id;
  std::vector<int64_t> slots;  // that were bound to it: their sequences must fail
  absl::Status status;         // DATA_LOSS: which page, what was expected and found
};

struct BlockResidency {
  int64_t device_pages = 0;  // of layout.pages_per_block()
};

// Counters since the store was made, for metrics; pages unless said otherwise. A page counts as one
// hit or miss in each step that reads it, however many rows and heads do.
struct KvStoreStats {
  int64_t device_pages_total = 0;
  int64_t device_pages_used = 0;
  int64_t host_blocks_total = 0;
  int64_t host_blocks_used = 0;
  int64_t promotions = 0;
  int64_t evictions = 0;
  int64_t bytes_host_to_device = 0;
  int64_t bytes_device_to_host = 0;
  int64_t checksum_failures = 0;
  int64_t device_hits = 0;    // answered by the device tier
  int64_t device_misses = 0;  // answered in place by the host tier
};

class KvStore {
 public:
  // Takes all memory at once. RESOURCE_EXHAUSTED, naming what is needed, when the sizes are too
  // small or memory is not to be had; INVALID_ARGUMENT for an impossible layout.
  static absl::StatusOr<std::unique_ptr<KvStore>> Create(const KvStoreOptions& options);
  virtual ~KvStore() = default;

  // --- blocks, at plan boundaries ---

  // A new empty block; RESOURCE_EXHAUSTED without room in the device tier for all its pages (after
  // eviction) or in the host tier; ALREADY_EXISTS for an id in use.
  virtual absl::StatusOr<Block> Open(BlockId id) = 0;
  // Another handle to a block that is kept or held; NOT_FOUND otherwise.
  virtual absl::StatusOr<Block> Get(BlockId id) = 0;
  // The block is full: copies it to the host tier with checksums. It is kept from now on, handles
  // or not. NOT_FOUND for an unknown block, FAILED_PRECONDITION when it is sealed already.
  virtual absl::Status Seal(BlockId id, const PrefixHash& hash) = 0;
  // The block is no longer kept. Unknown ids are ignored: the coordinator may drop what a rank
  // lost.
  virtual void Drop(BlockId id) = 0;
  // A plan may name it: Get would succeed.
  virtual bool Holds(BlockId id) const = 0;
  virtual BlockResidency Where(BlockId id) const = 0;

  // --- slots: block tables of running sequences ---

  // Makes `block` the index-th block of the slot, instead of what was there. The slot keeps a
  // handle until Unbind. REQUIRES: slot and index are in range.
  virtual void Bind(int64_t slot, int64_t index, Block block) = 0;
  // Removes the slot's blocks from `first_index` on (a truncation), all with 0 (the sequence left).
  virtual void Unbind(int64_t slot, int64_t first_index) = 0;

  // --- steps ---

  // Tables for the kernels of one step, valid until EndStep. REQUIRES: step numbers ascend, the
  // first is at least 1.
  virtual kernels::PagedKv BeginStep(uint32_t step) = 0;
  // Collects accesses and misses, promotes, evicts. FAILED_PRECONDITION outside of a step.
  virtual absl::Status EndStep() = 0;
  // Blocks found corrupt since the last call, each once. They are not held any more (the engine
  // reports them as lost) and freed when their slots are unbound. To be asked after EndStep and
  // before the step's results leave: rows of these slots fail with the block's status.
  virtual std::vector<CorruptBlock> TakeCorrupt() = 0;

  // Capacity in whole blocks, as the coordinator plans with it.
  virtual int64_t device_blocks() const = 0;
  virtual int64_t host_blocks() const = 0;
  virtual KvStoreStats stats() const = 0;

  // Free + used + pinned must add up in every tier; INTERNAL with the discrepancy. For tests.
  virtual absl::Status CheckIntegrity() const = 0;
};

}  // namespace kvasir::kvstore
