// The messages in which a worker tells the coordinator of its KV tiers: stored blocks, restored
// blocks, and how full the tiers are. Called by the engine. Functions without state.
#pragma once

#include <vector>

#include "absl/types/span.h"

#include "kvstore/kv_store.h"
#include "proto/kvasir/v1/worker.pb.h"

namespace kvasir::worker {

// Returns reports of all these blocks, of bounded size each.
std::vector<v1::TierReport> ReportsOf(absl::Span<const kvstore::StoredBlock> inventory);

void AddRestored(const kvstore::RestoredBlock& restored, v1::TierReport& report);
void AddErased(const kvstore::ErasedBlocks& erased, v1::TierReport& report);
void AddExported(const kvstore::ExportedBlock& exported, v1::TierReport& report);
void AddChanges(const kvstore::StoredChanges& changes, v1::TierReport& report);

v1::TierUsage UsageOf(const kvstore::KvStoreStats& stats);

}  // namespace kvasir::worker
