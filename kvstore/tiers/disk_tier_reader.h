// The thread of the disk tier that reads: it reads blocks in batches and verifies every byte. A
// block that comes back wrong or not at all is forgotten. Run by the disk tier on a thread of its
// own.
#pragma once

#include <cstddef>
#include <memory>

#include "absl/status/status.h"
#include "absl/types/span.h"

#include "kvstore/tiers/disk_tier_state.h"
#include "kvstore/tiers/extent_table.h"
#include "kvstore/tiers/file_io.h"
#include "kvstore/tiers/tier.h"

namespace kvasir::kvstore {

class DiskTierReader {
 public:
  // The state outlives the reader.
  explicit DiskTierReader(DiskTierState& state);

  // Carries out reads until the tier stops.
  void Run();

 private:
  void ReadBatch(absl::Span<const TierRead> reads);
  void FinishRead(const TierRead& read, const ExtentTable::Extent& found, IoRequest request,
                  absl::Status status);
  absl::Status ReadOne(const BlockIdentity& block, absl::Span<std::byte> extent, IoRequest request,
                       absl::Status status);

  DiskTierState& state_;
  const std::unique_ptr<IoQueue> queue_;
};

}  // namespace kvasir::kvstore
