// The durable table of the disk tier's blocks and their places, in RocksDB. Records carry their own
// checksum; damaged ones are left out. Called by the disk tier. Thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#include "kvstore/format/page_format.h"

namespace kvasir::kvstore {

struct ManifestRecord {
  BlockIdentity block;
  uint64_t segment = 0;
  int64_t offset = 0;
  uint64_t last_use = 0;  // greater: later
};

class Manifest {
 public:
  virtual ~Manifest() = default;
  // Commits one group: all of it or nothing survives a crash, and all of it once this returns OK.
  // After an error the manifest may refuse everything until it is opened again.
  virtual absl::Status Commit(absl::Span<const ManifestRecord> put,
                              absl::Span<const PrefixHash> removed) = 0;
  // Rewrites its files without what was removed or replaced.
  virtual absl::Status Purge() = 0;
  // Returns all records that are intact.
  virtual absl::StatusOr<std::vector<ManifestRecord>> Load() = 0;
  // Number of times the store has been opened, this time included: no two owners have the same.
  virtual uint64_t epoch() const = 0;
};

// Opens or creates the manifest in `directory`. FAILED_PRECONDITION when it has another
// `fingerprint` (ExtentFormat::Fingerprint), DATA_LOSS when it is damaged.
absl::StatusOr<std::unique_ptr<Manifest>> OpenManifest(const std::string& directory,
                                                       absl::string_view fingerprint);

}  // namespace kvasir::kvstore
