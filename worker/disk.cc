#include "worker/disk.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "spdlog/spdlog.h"

#include "kernels/base/status_macros.h"
#include "kvstore/format/head_extent.h"
#include "kvstore/heads/followed_store.h"
#include "kvstore/heads/head_stores.h"
#include "kvstore/tiers/disk_tier.h"
#include "kvstore/tiers/file_io.h"

namespace kvasir::worker {
namespace {

// Whether the error is a failure of the disk, not of the configuration.
bool IsPassing(const absl::Status& status) {
  return absl::IsResourceExhausted(status) || absl::IsUnavailable(status) ||
         absl::IsUnknown(status) || absl::IsDataLoss(status);
}

// Bytes of a rank that are made durable together, over its heads.
constexpr int64_t kGroupBytes = int64_t{64} << 20;

// Refuses a folder with stores of version 1 of the format, one for each rank of one degree.
absl::Status CheckVersion(const std::string& path) {
  const auto names = kvstore::MakeFileIo(kvstore::IoEngine::kIoUringOrThreads)->List(path);
  if (!names.ok())
    return absl::OkStatus();  // opening the stores says what is wrong with the folder
  for (const std::string& name : *names) {
    if (!absl::StartsWith(name, "tp") || !absl::StrContains(name, "-rank")) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "kv_disk_path ", path, " holds ", name,
        ", a store of version 1 of the page format; this release reads version 2. Remove the "
        "folders tp*-rank* in it, or choose another kv_disk_path; prompts are then computed "
        "again"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<kvstore::Tier>> OpenHead(const DiskOptions& options, int64_t head,
                                                        const kvstore::ExtentFormat& rank) {
  const int64_t num_heads = options.shard.layout.num_kv_heads;
  kvstore::DiskTierOptions disk;
  disk.directory = absl::StrCat(options.config.kv_disk_path(), "/head", head);
  disk.shard = kvstore::ShardOfHeads(options.shard, {.first = head, .count = 1});
  if (num_heads > 1) disk.memory = rank;
  disk.capacity_bytes = static_cast<int64_t>(options.config.kv_disk_size_gb() * 1e9) / num_heads;
  disk.group_bytes = kGroupBytes / num_heads;
  kvstore::FollowedStoreOptions followed = {
      .directory = disk.directory, .shard = disk.shard, .capacity_bytes = disk.capacity_bytes};
  absl::StatusOr<std::unique_ptr<kvstore::Tier>> store = kvstore::OpenDiskTier(std::move(disk));
  if (options.kv_replicas == 1 || !kvstore::IsOpenElsewhere(store.status())) return store;
  spdlog::info("disk tier {}: another rank writes it, this one follows", followed.directory);
  return kvstore::FollowStore(std::move(followed));
}

absl::StatusOr<std::unique_ptr<kvstore::Tier>> OpenHeads(const DiskOptions& options) {
  KVASIR_RETURN_IF_ERROR(CheckVersion(options.config.kv_disk_path()));
  KVASIR_ASSIGN_OR_RETURN(const kvstore::ExtentFormat rank,
                          kvstore::ExtentFormat::Create(options.shard));
  std::vector<std::unique_ptr<kvstore::Tier>> heads;
  for (int64_t i = 0; i < options.shard.layout.num_kv_heads; ++i) {
    KVASIR_ASSIGN_OR_RETURN(std::unique_ptr<kvstore::Tier> head,
                            OpenHead(options, options.shard.first_head + i, rank));
    heads.push_back(std::move(head));
  }
  if (heads.size() == 1) return std::move(heads[0]);
  return std::make_unique<kvstore::HeadStores>(rank, std::move(heads));
}

}  // namespace

absl::StatusOr<std::unique_ptr<kvstore::Tier>> OpenDisk(const DiskOptions& options) {
  if (options.config.kv_disk_path().empty()) return std::unique_ptr<kvstore::Tier>();
  absl::StatusOr<std::unique_ptr<kvstore::Tier>> tier = OpenHeads(options);
  const std::string& path = options.config.kv_disk_path();
  if (!tier.ok() && IsPassing(tier.status())) {
    spdlog::error("no disk tier in {}, serving without one: {}", path, tier.status().ToString());
    return std::unique_ptr<kvstore::Tier>();
  }
  if (tier.ok()) {
    const kvstore::TierStats stats = (*tier)->stats();
    spdlog::info("disk tier {}: {} of {} blocks of {} KV heads from {}, through {}", path,
                 stats.blocks, stats.capacity_blocks, options.shard.layout.num_kv_heads,
                 options.shard.first_head,
                 std::string(kvstore::IoEngineInUse(kvstore::IoEngine::kIoUringOrThreads)));
  }
  return tier;
}

}  // namespace kvasir::worker
