// The thread of the disk tier that writes: it makes blocks durable in groups, bytes first and then
// their records, evicts blocks to make room, and gives back the space and the records of forgotten
// ones. It hides the manifest, which it opens again after a failure, and when the tier is
// read-only. Run by the disk tier on a thread of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

#include "kvstore/format/extent_memory.h"
#include "kvstore/tiers/disk_tier_state.h"
#include "kvstore/tiers/extent_table.h"
#include "kvstore/tiers/file_io.h"
#include "kvstore/tiers/manifest.h"
#include "kvstore/tiers/tier.h"

namespace kvasir::kvstore {

class DiskTierWriter {
 public:
  // The state outlives the writer.
  DiskTierWriter(DiskTierState& state, std::unique_ptr<Manifest> manifest);

  // Takes the memory in which extents are made. RESOURCE_EXHAUSTED when there is none.
  absl::Status TakeMemory();
  // Carries out writes and removals until the tier stops; then records the last uses of blocks.
  void Run();

 private:
  size_t MostOfGroup() const;
  std::vector<TierWrite> TakeGroup() REQUIRES(state_.mu);
  // Returns the extents as they are written.
  std::vector<absl::Span<const std::byte>> ExtentsOf(absl::Span<const TierWrite> group) const;
  void WriteGroup(std::vector<TierWrite> group);
  absl::Status TryStore(absl::Span<const TierWrite> group);
  absl::Status Store(absl::Span<const TierWrite> group);
  absl::Status ReopenManifest();
  absl::Status MakeRoom(int64_t bytes);
  // Returns the number of blocks evicted.
  int64_t EvictOldest(int64_t bytes);
  void Remove(absl::Span<const ExtentTable::Removal> removals);
  void CarryOut(const TierErase& erase);
  absl::Status EraseBlocks(const TierErase& erase, TierErased& erased);
  // Returns the blocks of the table that the order covers, whose headers say whose they are.
  std::vector<ExtentTable::Extent> Covered(const TierErase& erase);
  void TurnReadOnly(const absl::Status& why);
  void TurnWritable();

  DiskTierState& state_;
  std::unique_ptr<Manifest> manifest_;
  bool manifest_failed_ = false;
  std::vector<PrefixHash> unrecorded_removals_;  // blocks that are gone but still have a record
  const std::unique_ptr<IoQueue> queue_;
  std::optional<ExtentMemory> made_;  // parts of larger extents, of one group
};

}  // namespace kvasir::kvstore
