// Which blocks lie in the disk tier and where: the table in memory that its reads and writes go by,
// and the order in which blocks leave, least recently used first. Hides that order, which uses are
// not recorded in the manifest yet, and how many read a block. Called by the disk tier, under its
// mutex. Thread-compatible.
#pragma once

#include <cstdint>
#include <list>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"

#include "kvstore/page_format.h"
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

  // Uses are numbered from `next_use`: above those of all records there are.
  explicit ExtentTable(uint64_t next_use = 1) : next_use_(next_use) {}

  // The block is here from now on, as the most recently used one. REQUIRES: it was not.
  void Add(const ManifestRecord& record);
  // What is to be given back; nothing when it is not here.
  std::optional<Removal> Remove(const PrefixHash& hash);

  bool Contains(const PrefixHash& hash) const { return entries_.contains(hash); }
  int64_t size() const { return static_cast<int64_t>(entries_.size()); }
  std::vector<StoredBlock> Inventory() const;

  // Of a block that is to be added when the record is durable.
  ManifestRecord NewRecord(const BlockIdentity& block, Place place);
  // The block was used just now. False when it is not here.
  bool Touch(const PrefixHash& hash);
  // Records of the blocks that were used since theirs were written.
  std::vector<ManifestRecord> TakeTouched();

  // Until EndRead it is not among those to evict. Nothing when it is not here.
  std::optional<Extent> BeginRead(const PrefixHash& hash);
  // False when the block that BeginRead found is gone.
  bool EndRead(const BlockIdentity& block);
  // The least recently used ones that nobody reads, at most so many.
  std::vector<PrefixHash> ToEvict(int64_t count) const;

 private:
  struct Entry {
    Extent extent;
    uint64_t last_use = 0;
    bool touched = false;  // used since its record was written
    int64_t readers = 0;   // reads under way
    std::list<PrefixHash>::iterator lru;
  };

  absl::flat_hash_map<PrefixHash, Entry> entries_;
  std::list<PrefixHash> lru_;  // least recently used first
  uint64_t next_use_;
  std::vector<PrefixHash> touched_;
};

}  // namespace kvasir::kvstore
