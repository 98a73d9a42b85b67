#include "kvstore/tiers/recover_extents.h"

#include <algorithm>
#include <filesystem>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "spdlog/spdlog.h"

#include "kernels/base/status_macros.h"

namespace kvasir::kvstore {
namespace {

absl::StatusOr<OpenedManifest> OpenAndLoad(const DiskTierOptions& options, const std::string& path,
                                           const ExtentFormat& format) {
  OpenedManifest opened;
  KVASIR_ASSIGN_OR_RETURN(opened.manifest, options.open_manifest(path, format.Fingerprint()));
  KVASIR_ASSIGN_OR_RETURN(opened.records, opened.manifest->Load());
  return opened;
}

// Whether there must have been a manifest: RocksDB would make an empty one.
bool IsLost(const std::string& path, const SegmentFiles& segments) {
  std::error_code ignored;
  return !segments.empty() && !std::filesystem::exists(path + "/CURRENT", ignored);
}

// Returns the records whose place exists, in the order of their last use.
ExtentTable Adopt(const std::string& directory, std::vector<ManifestRecord> records,
                  SegmentFiles& segments) {
  std::sort(records.begin(), records.end(), [](const ManifestRecord& a, const ManifestRecord& b) {
    return a.last_use < b.last_use;
  });
  ExtentTable table(records.empty() ? 1 : records.back().last_use + 1);
  for (const ManifestRecord& record : records) {
    if (!segments.Adopt({.segment = record.segment, .offset = record.offset})) {
      spdlog::warn("disk tier {}: a block is recorded in segment {}, which does not hold it",
                   directory, record.segment);
      continue;
    }
    table.Add(record);
  }
  return table;
}

}  // namespace

absl::StatusOr<OpenedManifest> OpenOrRebuildManifest(const DiskTierOptions& options,
                                                     const ExtentFormat& format,
                                                     SegmentFiles& segments) {
  const std::string path = options.directory + "/manifest";
  absl::Status status = absl::DataLossError("there are segments, but no manifest");
  if (!IsLost(path, segments)) {
    absl::StatusOr<OpenedManifest> opened = OpenAndLoad(options, path, format);
    if (opened.ok()) return opened;
    status = opened.status();
  }
  if (!absl::IsDataLoss(status)) {
    return absl::Status(status.code(),
                        absl::StrCat("disk tier ", options.directory, ": ", status.message()));
  }
  spdlog::warn("disk tier {}: {}; making the manifest anew from the segments", options.directory,
               status.ToString());
  OpenedManifest rebuilt;
  KVASIR_ASSIGN_OR_RETURN(rebuilt.records, segments.Scan(format));
  std::error_code ignored;  // opening reports what is left
  std::filesystem::remove_all(path, ignored);
  KVASIR_ASSIGN_OR_RETURN(rebuilt.manifest, options.open_manifest(path, format.Fingerprint()));
  KVASIR_RETURN_IF_ERROR(rebuilt.manifest->Commit(rebuilt.records, {}));
  return rebuilt;
}

absl::StatusOr<RecoveredExtents> RecoverExtents(const DiskTierOptions& options,
                                                const ExtentFormat& format,
                                                SegmentFiles& segments) {
  KVASIR_RETURN_IF_ERROR(options.io->MakeDirectory(options.directory + "/segments"));
  KVASIR_RETURN_IF_ERROR(segments.Open());
  KVASIR_ASSIGN_OR_RETURN(OpenedManifest opened, OpenOrRebuildManifest(options, format, segments));
  uint64_t epoch = opened.manifest->epoch();
  for (const ManifestRecord& record : opened.records) {
    epoch = std::max(epoch, (record.block.generation >> 32) + 1);
  }
  ExtentTable table = Adopt(options.directory, std::move(opened.records), segments);
  segments.RemoveUnused();
  return RecoveredExtents{.manifest = std::move(opened.manifest),
                          .table = std::move(table),
                          .first_generation = epoch << 32};
}

}  // namespace kvasir::kvstore
