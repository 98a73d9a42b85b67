// Table in memory of the disk tier's blocks and their places, by which its reads and writes work,
// and the order in which blocks leave, least recently used first. It hides that order, which uses
// are not yet recorded in the manifest, and how many readers a block has. Called by the disk tier,
// under its mutex. Thread-compatible.
#pragma once

#include <cstdint>
#include <list>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"

#include "kvstore/format/page_format.h"
#include "kvstore/tiers/manifest.h"
#include "kvstore/tiers/segment_files.h"
#include "kvstore/tiers/tier.h"

namespace kvasir::kvstore {

class ExtentTable {
 public:
  struct Extent {
    BlockIdentity block;
    Place place;
  };
  struct Removal {
    PrefixHash hash{};
    Place place;
  };

  // Numbers uses from `next_use`, which is above those of all existing records.
  explicit ExtentTable(uint64_t next_use = 1) : next_use_(next_use) {}

  // Adds a block, as the most recently used one. REQUIRES: it is not in the table.
  void Add(const ManifestRecord& record);
  // Returns what must be given back; nothing when the block is not in the table.
  std::optional<Removal> Remove(const PrefixHash& hash);

  bool Contains(const PrefixHash& hash) const { return entries_.contains(hash); }
  int64_t size() const { return static_cast<int64_t>(entries_.size()); }
  std::vector<StoredBlock> Inventory() const;

  // Returns the record of a block that will be added when the record is durable.
  ManifestRecord NewRecord(const BlockIdentity& block, Place place);
  // Records a use of the block now. False when it is not in the table.
  bool Touch(const PrefixHash& hash);
  // Returns records of the blocks that were used since theirs were written.
  std::vector<ManifestRecord> TakeTouched();

  // Protects the block from eviction until EndRead. Returns nothing when it is not in the table.
  std::optional<Extent> BeginRead(const PrefixHash& hash);
  // Returns false when the block that BeginRead found is gone.
  bool EndRead(const BlockIdentity& block);
  // Protects the block from eviction and erasing until EndHold. Returns nothing when it is not in
  // the table.
  std::optional<Extent> Hold(const PrefixHash& hash);
  void EndHold(const BlockIdentity& block);
  bool IsHeld(const PrefixHash& hash) const;
  // Returns the least recently used blocks that have no reader and no pin, at most `count`.
  std::vector<PrefixHash> ToEvict(int64_t count) const;
  // Keeps the block out of ToEvict, now or once it is added; and no longer.
  void Pin(const PrefixHash& hash);
  void Unpin(const PrefixHash& hash);

  // Returns all extents.
  std::vector<Extent> Extents() const;
  bool HasReader(const PrefixHash& hash) const;

 private:
  struct Entry {
    Extent extent;
    uint64_t last_use = 0;
    bool touched = false;  // used since its record was written
    int64_t readers = 0;   // reads in flight
    int64_t holders = 0;   // who read its pages one by one
    std::list<PrefixHash>::iterator lru;
  };

  // The order of use that the block is in: of those that may go, or of the pinned ones.
  std::list<PrefixHash>& OrderOf(const PrefixHash& hash) {
    return pins_.contains(hash) ? pinned_lru_ : lru_;
  }

  absl::flat_hash_map<PrefixHash, Entry> entries_;
  std::list<PrefixHash> lru_;  // least recently used first
  std::list<PrefixHash> pinned_lru_;
  absl::flat_hash_set<PrefixHash> pins_;
  uint64_t next_use_;
  std::vector<PrefixHash> touched_;
};

}  // namespace kvasir::kvstore
