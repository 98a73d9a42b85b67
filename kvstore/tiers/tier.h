// A tier for whole extents below the host tier: the disk, peers. Asynchronous and batched: the
// memory that a request names must not change until its completion has been polled. A tier may
// forget any block at any time and reports it; it never returns bytes that are not the block's.
// Called by the KV store; tests/support has a double. Thread-compatible: used only by the engine's
// thread.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/types/span.h"

#include "kvstore/format/page_format.h"
#include "kvstore/peers/lent_blocks.h"
#include "kvstore/tiers/file_io.h"

namespace kvasir::kvstore {

struct TierWrite {
  uint64_t ticket = 0;  // names the completion; chosen by the caller
  BlockIdentity block;
  absl::Span<const std::byte> extent;  // with its header, aligned to kExtentAlignment
};

struct TierRead {
  uint64_t ticket = 0;
  PrefixHash hash{};
  // Aligned to kExtentAlignment. The whole extent, or of a block that is held its front alone
  // (page_format.h).
  absl::Span<std::byte> extent;
};

struct TierCompletion {
  uint64_t ticket = 0;
  // Write: OK means that the block survives a restart; UNAVAILABLE when the tier takes no writes
  // now. Read: OK means that every byte was verified; NOT_FOUND for a block that is not stored,
  // DATA_LOSS when it is damaged (then it is forgotten).
  absl::Status status;
  BlockIdentity block;  // for a read
  // A peer was asked, not this process's own tier. It may not have had the block: NOT_FOUND.
  bool from_peer = false;
};

// Blocks that are overwritten and forgotten: those of an owner and those whose owner is not known,
// some, or all.
struct TierErase {
  uint64_t ticket = 0;
  std::optional<PrefixHash> owner = {};
  std::optional<absl::flat_hash_set<PrefixHash>> blocks = {};  // neither: all

  bool Covers(const BlockIdentity& block) const {
    if (blocks.has_value()) return blocks->contains(block.hash);
    return !owner.has_value() || block.owner == *owner || block.owner == PrefixHash{};
  }
};

struct TierErased {
  uint64_t ticket = 0;
  // OK: no byte of the blocks can be read, nor of blocks that were forgotten before.
  absl::Status status;
  int64_t blocks = 0;
  int64_t bytes = 0;  // overwritten
};

struct StoredBlock {
  PrefixHash hash{};
  std::array<int32_t, kBlockTokens> tokens{};
};

// Changes since the last call.
struct TierEvents {
  std::vector<TierCompletion> completions;
  std::vector<PrefixHash> forgotten;  // evicted or damaged
  std::vector<StoredBlock> found;     // stored by another process
  std::vector<TierErased> erased;
};

// Counters since the tier was opened, unless said otherwise. Blocks count once, however many peers
// were asked for them.
struct PeerStats {
  int64_t configured = 0;  // peers that this process was told of
  int64_t linked = 0;      // those of them that answer, now
  int64_t fetched_blocks = 0;
  int64_t fetched_bytes = 0;
  int64_t absent_blocks = 0;   // no peer had them
  int64_t failed_blocks = 0;   // a peer failed, was late or went, and no other one had them
  int64_t refused_blocks = 0;  // other bytes came than were sealed
  int64_t lent_blocks = 0;     // given to other processes
  int64_t lent_bytes = 0;
};

// Counters since the tier was opened, unless said otherwise.
struct TierStats {
  int64_t capacity_blocks = 0;
  int64_t blocks = 0;     // now
  bool writable = false;  // now
  int64_t written_blocks = 0;
  int64_t written_bytes = 0;
  double write_seconds = 0;    // time spent in writing
  int64_t refused_writes = 0;  // while not writable
  int64_t failed_writes = 0;
  int64_t read_blocks = 0;
  int64_t read_bytes = 0;
  double read_seconds = 0;   // time spent in reading and verifying
  int64_t failed_reads = 0;  // by the device
  int64_t checksum_failures = 0;
  int64_t evictions = 0;
  PeerStats peers;
};

// A stored block that stays where it is until this is destroyed, before the tier. Its pages can be
// read one by one, through a queue of the tier. Thread-safe: const functions only.
class HeldExtent {
 public:
  struct Place {
    File* file = nullptr;
    int64_t offset = 0;
  };

  virtual ~HeldExtent() = default;
  // Where the page begins, for a page of the extents that the tier is given.
  virtual Place Find(int64_t page_in_block) const = 0;
  // Whether all of it was written by this sealing of the block.
  virtual bool IsOfSealing(uint64_t generation) const = 0;
};

class Tier {
 public:
  virtual ~Tier() = default;

  // The write of a block that is stored already completes as OK.
  virtual void Write(std::vector<TierWrite> writes) = 0;
  virtual void Read(std::vector<TierRead> reads) = 0;
  // Lets these blocks stay when others give way, whether they are stored already or will be, until
  // Unpin.
  virtual void Pin(absl::Span<const PrefixHash> /*blocks*/) {}
  virtual void Unpin(absl::Span<const PrefixHash> /*blocks*/) {}
  // Begins to erase, after which TierEvents tells of it. False when the tier has nothing of its own
  // to erase. REQUIRES: none of the blocks is being written.
  virtual bool Erase(TierErase /*erase*/) { return false; }
  // Returns the events since the last call. Does not wait.
  virtual TierEvents Poll() = 0;
  // Waits until there is something to poll, or nothing is in flight.
  virtual void Wait() = 0;
  // Whether blocks are likely to be found soon, though nothing is in flight.
  virtual bool ExpectsBlocks() const { return false; }

  virtual const ExtentFormat& format() const = 0;
  virtual bool Holds(const PrefixHash& hash) const = 0;
  // Whether it is worth to read a block that the tier may not hold itself.
  virtual bool MayRead(const PrefixHash& hash) const { return Holds(hash); }
  // Null when the block is not stored, or the tier cannot keep it where it is.
  virtual std::unique_ptr<HeldExtent> Hold(const PrefixHash& /*hash*/) { return nullptr; }
  // Returns a queue for reading pages of held blocks; null where no block can be held.
  virtual std::unique_ptr<IoQueue> NewReadQueue() { return nullptr; }
  // Forgets a held block of which a page came back wrong (DATA_LOSS) or not at all (another code).
  virtual void ForgetDamaged(const PrefixHash& /*hash*/, absl::StatusCode /*why*/) {}
  // Where the store says which blocks of the host tier others may read; null: nobody reads them.
  virtual LentBlocks* lent_blocks() { return nullptr; }
  virtual std::vector<StoredBlock> Inventory() const = 0;
  // First generation of blocks sealed by this process: above all those of its predecessors.
  virtual uint64_t first_generation() const = 0;
  virtual TierStats stats() const = 0;
};

}  // namespace kvasir::kvstore
