#include "worker/disk.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "spdlog/spdlog.h"

#include "kvstore/tiers/disk_tier.h"
#include "kvstore/tiers/file_io.h"

namespace kvasir::worker {
namespace {

// Whether the error is a failure of the disk, not of the configuration.
bool IsPassing(const absl::Status& status) {
  return absl::IsResourceExhausted(status) || absl::IsUnavailable(status) ||
         absl::IsUnknown(status) || absl::IsDataLoss(status);
}

}  // namespace

absl::StatusOr<std::unique_ptr<kvstore::Tier>> OpenDisk(const DiskOptions& options) {
  if (options.config.kv_disk_path().empty()) return std::unique_ptr<kvstore::Tier>();
  // Ranks of groups of different sizes hold different heads.
  const std::string directory =
      absl::StrCat(options.config.kv_disk_path(), "/tp", options.num_ranks, "-rank", options.rank);
  kvstore::DiskTierOptions disk;
  disk.directory = directory;
  disk.shard = options.shard;
  disk.capacity_bytes = static_cast<int64_t>(options.config.kv_disk_size_gb() * 1e9);
  absl::StatusOr<std::unique_ptr<kvstore::Tier>> tier = kvstore::OpenDiskTier(std::move(disk));
  if (!tier.ok() && IsPassing(tier.status())) {
    spdlog::error("no disk tier in {}, serving without one: {}", directory,
                  tier.status().ToString());
    return std::unique_ptr<kvstore::Tier>();
  }
  if (tier.ok()) {
    const kvstore::TierStats stats = (*tier)->stats();
    spdlog::info("disk tier {}: {} of {} blocks, through {}", directory, stats.blocks,
                 stats.capacity_blocks,
                 std::string(kvstore::IoEngineInUse(kvstore::IoEngine::kIoUringOrThreads)));
  }
  return tier;
}

}  // namespace kvasir::worker
