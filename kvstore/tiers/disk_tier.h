// The disk tier: extents in append-only segment files, and a table of them in a manifest. A write
// is done when its bytes and then its record are durable; writes are made durable in groups. Reads
// are verified before they complete. The least recently used blocks leave when the capacity is
// reached; their space is given back at once by punching holes, or with their segment where the
// file system cannot.
//
// A disk that is full or fails never stops the service: the tier turns read-only (writes complete
// as UNAVAILABLE), reports it in a log line and in stats, and tries again after `retry_after`. The
// same happens when the store is removed while it is open, which the next write notices. A segment
// with a failed write or sync is not written to again. A block whose bytes come back wrong or not
// at all is forgotten.
//
//   directory/LOCK                      held while the store is open, names the owner
//   directory/manifest/                 RocksDB
//   directory/segments/<16 hex digits>  extents one after the other
//
// It hides one thread that writes and one that reads. Thread-compatible as a Tier.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "kvstore/format/page_format.h"
#include "kvstore/tiers/file_io.h"
#include "kvstore/tiers/manifest.h"
#include "kvstore/tiers/tier.h"

namespace kvasir::kvstore {

using ManifestOpener = std::function<absl::StatusOr<std::unique_ptr<Manifest>>(
    const std::string& directory, absl::string_view fingerprint)>;

struct DiskTierOptions {
  std::string directory;
  KvShard shard;
  // Form of the extents that the tier is given, where they hold more heads than the shard's one:
  // then only its part of them is written and read, and not their header.
  std::optional<ExtentFormat> memory;
  int64_t capacity_bytes = 0;  // at least one extent
  int64_t segment_bytes = int64_t{1} << 30;
  // Bytes made durable together. A read may have to wait for them, and a crash may lose them.
  int64_t group_bytes = int64_t{64} << 20;
  std::chrono::steady_clock::duration retry_after = std::chrono::seconds(1);
  // Seams: files, manifest and clock. The defaults are the real ones.
  std::unique_ptr<FileIo> io = MakeFileIo(IoEngine::kIoUringOrThreads);
  ManifestOpener open_manifest = OpenManifest;
  std::function<std::chrono::steady_clock::time_point()> now = std::chrono::steady_clock::now;
};

// Opens the store in the directory, or creates it. A damaged manifest is rebuilt from the headers
// of the extents. FAILED_PRECONDITION when another process has the store open, or when it holds KV
// of another model, shard or version; then it is left unchanged.
absl::StatusOr<std::unique_ptr<Tier>> OpenDiskTier(DiskTierOptions options);
// Whether OpenDiskTier failed because another process has the store open.
bool IsOpenElsewhere(const absl::Status& status);

}  // namespace kvasir::kvstore
