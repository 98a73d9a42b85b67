// The tiered KV store of one worker: the door to kvstore/. It owns every byte of K and V of its
// rank and decides where each lies: in the device tier (HBM, or a bounded arena on the CPU), in the
// host tier, or in a tier below it (the disk). The engine opens, seals and drops blocks as the
// coordinator's plans say, binds them to sequence slots, and gives kernels the tables of a step; it
// never sees an address. The store hides arenas, page tables, eviction, promotion, checksums,
// write-behind.
//
// Life of a block:  Open -> (pages written in the device tier over some steps) -> Seal ->
// immutable, host tier holds all of it, the device tier caches single pages -> Drop (no longer
// kept) and last handle gone -> freed. A block that was never sealed is freed with its last handle.
// A sealed block may be stored in the tier below (Persist), by its prefix hash. There it outlives
// ids, Drop and the process; Restore makes it a sealed, kept block again. Sealed blocks that an
// earlier store left in the host memory are adopted: they are stored, too, until their room is
// needed, and Restore finds them first.
//
// With lean blocks (kvstore/on_demand/), blocks in use need no room in the host tier once they are
// in the tier below: a restored block brings its digests alone, and where the host tier is full,
// the blocks that were not read for longest leave it. Their pages are read from the tier below when
// kernels want them.
//
// Residency changes only at step boundaries: tables are constant between BeginStep and EndStep, and
// only const functions may be called between them; handles may be destroyed. A page read in place
// from the host tier is a miss. It is promoted when the bytes missed in it over the last steps
// reach its size: one read of the whole page is enough. Pages of open blocks are pinned in the
// device tier. The host tier includes every sealed block that is not lean, so eviction writes
// nothing back.
//
// A PageResidency decides how pages move, and whether they are verified on their way into the
// device tier: a page that fails quarantines its block (see TakeCorrupt). Thread-compatible: used
// only by the engine's thread, which also destroys the handles; the store outlives them.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

#include "kernels/paged/paged_kv.h"
#include "kvstore/adopted_blocks.h"
#include "kvstore/format/block.h"
#include "kvstore/format/page_format.h"
#include "kvstore/host/freed_memory.h"
#include "kvstore/host/host_memory.h"
#include "kvstore/on_demand/page_cache.h"
#include "kvstore/tiers/arena_residency.h"
#include "kvstore/tiers/page_residency.h"
#include "kvstore/tiers/tier.h"

namespace kvasir::kvstore {

struct KvStoreOptions {
  // Identity of the KV. Without a tier below, the layout is enough.
  KvShard shard;
  int64_t device_bytes = 0;  // rounded down to whole pages; at least two blocks
  // Rounded down to whole extents (page_format.h) with their key codes; at least two, and one more
  // for each kBlocksPerTransfer when there is a tier below.
  int64_t host_bytes = 0;
  int64_t num_slots = 0;
  int64_t max_blocks_per_slot = 0;
  // Whether to keep key codes (kernels/append/key_codes.h) beside the host tier, within host_bytes.
  bool key_codes = false;
  // kPoisoned in tests: stale reads show as NaN.
  FreedMemory freed_memory = FreedMemory::kAsIs;
  // Memory of the host tier, whose sealed blocks the store adopts. It outlives the store. Null: the
  // store makes its own.
  HostMemory* memory = nullptr;
  std::string owner = {};  // rank and degree: "rank 0 of 2". Others' blocks are not adopted
  // KV of lean blocks, whose pages lie in the tier below alone. Half of host_bytes is then for
  // single pages of them; what stays in memory of each block comes on top. 0: none. Without a tier
  // below that can hold its blocks there are none either.
  int64_t on_demand_bytes = 0;
  int num_threads = 1;  // that run kernels
};

// With a tier below, one extent of the host tier in this many is set aside for blocks that are
// being written or read there and are no longer kept. host_blocks() does not count them.
inline constexpr int64_t kBlocksPerTransfer = 16;

// A block whose bytes differ from those sealed: everything computed from it may be wrong.
struct CorruptBlock {
  BlockId id;
  std::vector<int64_t> slots;  // slots bound to it: their sequences must fail
  absl::Status status;         // DATA_LOSS: which page, what was expected and found
};

struct BlockResidency {
  int64_t device_pages = 0;  // of layout.pages_per_block()
  bool stored = false;       // in the tier below
  // Restored from the tier below and not bound to a slot since. Its first user counts it as a hit
  // of that tier.
  bool restored = false;
  bool from_peer = false;  // restored, and a peer gave it
};

struct RestoredBlock {
  BlockId id;
  // OK: the block is sealed and kept. Otherwise it is gone: NOT_FOUND or DATA_LOSS of the tier
  // below.
  absl::Status status;
};

// The end of an Erase.
struct ErasedBlocks {
  uint64_t ticket = 0;
  absl::Status status = {};  // of the tier below
  int64_t host_blocks = 0;
  int64_t host_bytes = 0;
  int64_t below_blocks = 0;
  int64_t below_bytes = 0;
  int64_t blocks_in_use = 0;  // left where they are
};

// One KV head's part of a block, as an extent of the head's store.
struct HeadPart {
  int64_t head = 0;  // of the model
  absl::Span<const std::byte> extent = {};
};

// A block's parts, as Export took them.
struct ExportedBlock {
  struct Part {
    int64_t head = 0;
    std::vector<std::byte> extent = {};
  };
  uint64_t ticket = 0;
  absl::Status status = {};  // NOT_FOUND: the block is not held; DATA_LOSS: it is damaged
  std::vector<Part> parts = {};
};

// Changes of what is stored in the tier below since the last report.
struct StoredChanges {
  std::vector<StoredBlock> stored;
  std::vector<PrefixHash> forgotten;
};

// Counters since the store was made, for metrics. A page counts as one hit or miss in each step
// that reads it, however many rows and heads do.
struct KvStoreStats : ResidencyStats {
  int64_t device_pages_total = 0;
  int64_t host_blocks_total = 0;
  int64_t host_blocks_used = 0;
  // The tier below, all zero without one.
  int64_t queued_writes = 0;   // blocks that wait or are being written, now
  int64_t dropped_writes = 0;  // blocks not written, because too many waited or room was needed
  int64_t restored_blocks = 0;
  int64_t failed_restores = 0;
  TierStats tier;
  AdoptionStats adoption;
  // Lean blocks, all zero without them.
  int64_t lean_blocks = 0;  // now
  int64_t lean_blocks_total = 0;
  int64_t shed_blocks = 0;  // that left the host tier while they were in use
  PageCacheStats pages;
};

class KvStore {
 public:
  // Takes all memory at once. RESOURCE_EXHAUSTED, naming what is needed, when the sizes are too
  // small or there is not enough memory; INVALID_ARGUMENT for an impossible layout, or a tier
  // `below` (null: none) of another shard. `make_pages` makes both tiers' memory and the mechanism
  // that moves pages.
  static absl::StatusOr<std::unique_ptr<KvStore>> Create(
      const KvStoreOptions& options, std::unique_ptr<Tier> below = nullptr,
      const ResidencyMaker& make_pages = ArenaResidency::Make);
  virtual ~KvStore() = default;

  // --- blocks, at plan boundaries ---

  // Returns a new empty block. RESOURCE_EXHAUSTED without room in the device tier for all its pages
  // (after eviction) or in the host tier; ALREADY_EXISTS for an id in use.
  virtual absl::StatusOr<Block> Open(BlockId id) = 0;
  // Returns another handle to a block that is kept or held; NOT_FOUND otherwise.
  virtual absl::StatusOr<Block> Get(BlockId id) = 0;
  // Copies a full block to the host tier, with checksums and its kBlockTokens tokens, by which a
  // later store adopts it. It is kept from then on, with or without handles. NOT_FOUND for an
  // unknown block, FAILED_PRECONDITION when it is sealed already. `owner`: by which it can be
  // erased.
  virtual absl::Status Seal(BlockId id, const PrefixHash& hash, absl::Span<const int32_t> tokens,
                            const PrefixHash& owner = {}) = 0;
  // Stops keeping the block. Unknown ids are ignored: the coordinator may drop blocks that a rank
  // lost.
  virtual void Drop(BlockId id) = 0;
  // Whether a plan may name the block: Get would succeed.
  virtual bool Holds(BlockId id) const = 0;
  virtual BlockResidency Where(BlockId id) const = 0;

  // --- slots: block tables of running sequences ---

  // Makes `block` the index-th block of the slot, replacing any earlier one. The slot keeps a
  // handle until Unbind. REQUIRES: slot and index are in range.
  virtual void Bind(int64_t slot, int64_t index, Block block) = 0;
  // Removes the slot's blocks from `first_index` on: for a truncation, or all (0) when the sequence
  // leaves.
  virtual void Unbind(int64_t slot, int64_t first_index) = 0;
  // Brings pages of the slot's sealed blocks from the host tier into the device tier before the
  // kernels of the next step run, as many as find room beside what running sequences read. Pays
  // where the kernels of this and later steps would read as much in place.
  virtual void Promote(int64_t slot) = 0;

  // --- steps ---

  // Whether a step that opens at most so many blocks may begin while the device still carries out
  // another: no block in use leaves host memory for it, and neither reads pages on disk.
  virtual bool MayRunAhead(int64_t opened) const = 0;
  // Returns tables for the kernels of one step, valid until EndStep. REQUIRES: step numbers ascend,
  // and the first is at least 1. Errors are the device's.
  virtual absl::StatusOr<kernels::PagedKv> BeginStep(uint32_t step) = 0;
  // Collects accesses and misses, promotes, evicts. FAILED_PRECONDITION outside of a step.
  virtual absl::Status EndStep() = 0;
  // Returns blocks found corrupt since the last call, each once. They are not held any more (the
  // engine reports them as lost) and are freed when their slots are unbound. Call it after EndStep
  // and before the step's results leave: rows of these slots fail with the block's status.
  virtual std::vector<CorruptBlock> TakeCorrupt() = 0;

  // --- the tier below and adopted blocks, at plan boundaries ---

  // Queues the block to be written there after the steps. REQUIRES: `tokens` are the block's
  // kBlockTokens tokens. Does nothing when the block is stored already, unknown or not sealed. The
  // write is dropped, and counted, when too many wait or the tier takes no writes.
  // TakeStoredChanges reports what was stored.
  virtual void Persist(BlockId id, absl::Span<const int32_t> tokens) = 0;
  // Lets stored blocks, now or once they are stored, stay in the tier below until Unpin.
  virtual void PinBelow(absl::Span<const PrefixHash> blocks) = 0;
  virtual void UnpinBelow(absl::Span<const PrefixHash> blocks) = 0;
  // Overwrites blocks in the host tier and below, once nobody holds them: those that are dropped
  // before the next step are erased, others are counted. TakeErased tells the end. Memory and files
  // then hold no byte of blocks that went before either.
  virtual void Erase(TierErase erase) = 0;
  virtual std::vector<ErasedBlocks> TakeErased() = 0;
  // Copies the parts of the rank's heads of a held block, once it is whole and verified.
  // TakeExported has them; FAILED_PRECONDITION for a block whose pages lie in the tier below only.
  virtual void Export(uint64_t ticket, BlockId id) = 0;
  virtual std::vector<ExportedBlock> TakeExported() = 0;
  // Makes a sealed, kept block `id` of the parts of the rank's heads, which are among `parts` and
  // are verified. `block` is without its generation. Errors: FAILED_PRECONDITION for another model
  // or form, DATA_LOSS for other bytes or another block, NOT_FOUND for a head that is missing;
  // otherwise as Restore.
  virtual absl::Status Import(BlockId id, const BlockIdentity& block,
                              absl::Span<const HeadPart> parts) = 0;
  // Starts to read a stored block as block `id`. Until TakeRestored names it, it can be dropped but
  // not used. NOT_FOUND when it is not stored, ALREADY_EXISTS for an id in use, RESOURCE_EXHAUSTED
  // without room in the host tier. `owner` is that of Seal: what a peer or a file says of it is not
  // believed.
  virtual absl::Status Restore(BlockId id, const PrefixHash& hash,
                               const PrefixHash& owner = {}) = 0;
  // Takes the results of the tier below and hands it what waits. EndStep does so too. An engine
  // without work calls it from time to time while the tier is busy: blocks wait or are in transfer.
  virtual void PollTier() = 0;
  virtual bool TierIsBusy() const = 0;
  virtual std::vector<RestoredBlock> TakeRestored() = 0;
  virtual StoredChanges TakeStoredChanges() = 0;
  // Returns everything that is stored. Called at the start, before any change is taken.
  virtual std::vector<StoredBlock> Inventory() const = 0;
  // Waits until every accepted write has ended. Called before the process ends. DEADLINE_EXCEEDED
  // after `most`: writes that had not begun by then are given up, and those under way have ended.
  virtual absl::Status Flush(absl::Duration most) = 0;

  // Capacity in whole blocks, with which the coordinator plans: open ones, and all.
  virtual int64_t device_blocks() const = 0;
  virtual int64_t host_blocks() const = 0;
  // Waits of the slot's sequence for pages on disk, since the last call.
  virtual SlotWaits TakeWaits(int64_t slot) = 0;
  virtual KvStoreStats stats() const = 0;

  // Free + used + pinned must add up in every tier; INTERNAL with the discrepancy. For tests.
  virtual absl::Status CheckIntegrity() const = 0;
};

}  // namespace kvasir::kvstore
