// Opens the disk tier: finds the extents that earlier processes left. It hides how a damaged
// manifest is rebuilt from the headers of the extents, which records are unusable, and how the
// order of use and the generations continue. Called by the disk tier at its start, before its
// threads run, and by its writing thread when the manifest has failed.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"

#include "kvstore/format/page_format.h"
#include "kvstore/tiers/disk_tier.h"
#include "kvstore/tiers/extent_table.h"
#include "kvstore/tiers/manifest.h"
#include "kvstore/tiers/segment_files.h"

namespace kvasir::kvstore {

struct OpenedManifest {
  std::unique_ptr<Manifest> manifest;
  std::vector<ManifestRecord> records;
};

// Rebuilds a damaged or lost manifest from the headers of the extents in `segments`, which are
// open.
absl::StatusOr<OpenedManifest> OpenOrRebuildManifest(const DiskTierOptions& options,
                                                     const ExtentFormat& format,
                                                     SegmentFiles& segments);

struct RecoveredExtents {
  std::unique_ptr<Manifest> manifest;
  ExtentTable table;
  uint64_t first_generation = 0;  // above all that were given before
};

// Also opens `segments`, and removes those that hold nothing. FAILED_PRECONDITION as in
// OpenDiskTier.
absl::StatusOr<RecoveredExtents> RecoverExtents(const DiskTierOptions& options,
                                                const ExtentFormat& format, SegmentFiles& segments);

}  // namespace kvasir::kvstore
