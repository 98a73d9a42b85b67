// The thread of the disk tier that reads: it reads blocks in batches and verifies every byte. A
// block that comes back wrong or not at all is forgotten. Run by the disk tier on a thread of its
// own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/types/span.h"

#include "kvstore/format/extent_memory.h"
#include "kvstore/tiers/disk_tier_state.h"
#include "kvstore/tiers/extent_table.h"
#include "kvstore/tiers/file_io.h"
#include "kvstore/tiers/tier.h"

namespace kvasir::kvstore {

class DiskTierReader {
 public:
  // The state outlives the reader.
  explicit DiskTierReader(DiskTierState& state);

  // Takes the memory into which extents are read. RESOURCE_EXHAUSTED when there is none.
  absl::Status TakeMemory();
  // Carries out reads until the tier stops.
  void Run();

 private:
  bool IsFront(const TierRead& read) const;
  void ReadBatch(absl::Span<const TierRead> reads);
  void FinishRead(const TierRead& read, const ExtentTable::Extent& found, IoRequest request,
                  absl::Status status);
  absl::Status ReadOne(const BlockIdentity& block, IoRequest request, absl::Status status);

  DiskTierState& state_;
  const int64_t batch_;  // the most extents read together
  const std::unique_ptr<IoQueue> queue_;
  std::optional<ExtentMemory> read_;  // parts of larger extents, of one batch
};

}  // namespace kvasir::kvstore
