#include "worker/engine/tier_reports.h"

#include <cstdint>
#include <string>

namespace kvasir::worker {
namespace {

// With token ids of three bytes a report of this many blocks has less than 4 MB.
constexpr int kStoredBlocksPerReport = 16384;

void AddStored(const kvstore::StoredBlock& block, v1::TierReport& report) {
  v1::StoredBlock& stored = *report.add_stored();
  stored.set_prefix_hash(block.hash.data(), block.hash.size());
  for (const int32_t token : block.tokens) stored.add_tokens(static_cast<uint32_t>(token));
}

}  // namespace

std::vector<v1::TierReport> ReportsOf(absl::Span<const kvstore::StoredBlock> inventory) {
  std::vector<v1::TierReport> reports;
  for (const kvstore::StoredBlock& block : inventory) {
    if (reports.empty() || reports.back().stored_size() == kStoredBlocksPerReport) {
      reports.emplace_back();
    }
    AddStored(block, reports.back());
  }
  return reports;
}

void AddRestored(const kvstore::RestoredBlock& restored, v1::TierReport& report) {
  v1::RestoredBlock& message = *report.add_restored();
  message.set_block_id(static_cast<uint64_t>(restored.id.value));
  message.set_error_code(static_cast<int32_t>(restored.status.code()));
  message.set_error_message(std::string(restored.status.message()));
}

void AddErased(const kvstore::ErasedBlocks& erased, v1::TierReport& report) {
  v1::Erased& message = *report.add_erased();
  message.set_id(erased.ticket);
  message.set_host_blocks(static_cast<uint64_t>(erased.host_blocks));
  message.set_host_bytes(static_cast<uint64_t>(erased.host_bytes));
  message.set_disk_blocks(static_cast<uint64_t>(erased.below_blocks));
  message.set_disk_bytes(static_cast<uint64_t>(erased.below_bytes));
  message.set_blocks_in_use(static_cast<uint64_t>(erased.blocks_in_use));
  message.set_error_code(static_cast<int32_t>(erased.status.code()));
  message.set_error_message(std::string(erased.status.message()));
}

void AddExported(const kvstore::ExportedBlock& exported, v1::TierReport& report) {
  v1::ExportedBlock& message = *report.add_exported();
  message.set_id(exported.ticket);
  message.set_error_code(static_cast<int32_t>(exported.status.code()));
  message.set_error_message(std::string(exported.status.message()));
  for (const kvstore::ExportedBlock::Part& part : exported.parts) {
    v1::HeadExtent& head = *message.add_heads();
    head.set_head(static_cast<uint32_t>(part.head));
    head.set_extent(part.extent.data(), part.extent.size());
  }
}

void AddChanges(const kvstore::StoredChanges& changes, v1::TierReport& report) {
  for (const kvstore::StoredBlock& block : changes.stored) AddStored(block, report);
  for (const kvstore::PrefixHash& hash : changes.forgotten) {
    report.add_forgotten(hash.data(), hash.size());
  }
}

v1::TierUsage UsageOf(const kvstore::KvStoreStats& stats) {
  v1::TierUsage usage;
  usage.set_device_pages_used(static_cast<uint64_t>(stats.device_pages_used));
  usage.set_device_pages_total(static_cast<uint64_t>(stats.device_pages_total));
  usage.set_host_blocks_used(static_cast<uint64_t>(stats.host_blocks_used));
  usage.set_host_blocks_total(static_cast<uint64_t>(stats.host_blocks_total));
  usage.set_disk_blocks_used(static_cast<uint64_t>(stats.tier.blocks));
  usage.set_disk_blocks_total(static_cast<uint64_t>(stats.tier.capacity_blocks));
  return usage;
}

}  // namespace kvasir::worker
