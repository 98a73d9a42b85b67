// The disk and the peer of a SymbolicWorker: writes, reads and what it reports of them. The end of
// symbolic_worker.h, which every user includes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"

#include "proto/kvasir/v1/worker.pb.h"
#include "tests/support/symbolic_worker.h"

namespace kvasir::testing {

inline absl::Status SymbolicWorker::Persist(const v1::BlockPersist& persist) {
  if (options_.disk_blocks == 0) return Bad("stores without a disk", persist.block_id());
  if (persist.tokens_size() != kTokens) return Bad("stores half a block", persist.block_id());
  const auto it = blocks_.find(persist.block_id());
  if (it == blocks_.end() || it->second.prefix_hash.empty()) return absl::OkStatus();
  writes_[it->second.prefix_hash] = {.fingerprint = it->second.fingerprint,
                                     .tokens = {persist.tokens().begin(), persist.tokens().end()}};
  return absl::OkStatus();
}

inline absl::Status SymbolicWorker::Restore(const v1::BlockRestore& restore) {
  if (!used_ids_.insert(restore.block_id()).second) {
    return Bad("restores a block that is not new", restore.block_id());
  }
  const auto owner = owners_.try_emplace(restore.prefix_hash(), restore.owner()).first;
  if (restore.owner().empty() || owner->second != restore.owner()) {
    return Bad("restores a block that is another tenant's", restore.block_id());
  }
  blocks_[restore.block_id()] = {
      .kept = true, .prefix_hash = restore.prefix_hash(), .restoring = true};
  restores_.push_back(restore.block_id());
  return absl::OkStatus();
}

inline void SymbolicWorker::EndWrite(const std::string& hash, v1::TierReport& report) {
  const auto write = writes_.extract(hash);
  if (static_cast<int64_t>(stored_.size()) >= options_.disk_blocks) {
    report.add_forgotten(stored_.begin()->first);
    stored_.erase(stored_.begin());
  }
  v1::StoredBlock& stored = *report.add_stored();
  stored.set_prefix_hash(hash);
  stored.mutable_tokens()->Assign(write.mapped().tokens.begin(), write.mapped().tokens.end());
  stored_[hash] = write.mapped();
}

inline void SymbolicWorker::EndRead(uint64_t id, bool fails, v1::TierReport& report) {
  const auto it = blocks_.find(id);
  if (it == blocks_.end()) return;  // dropped meanwhile
  v1::RestoredBlock& restored = *report.add_restored();
  restored.set_block_id(id);
  const auto found = stored_.find(it->second.prefix_hash);
  const auto lent = at_peer_.find(it->second.prefix_hash);
  it->second.from_peer = found == stored_.end() && lent != at_peer_.end();
  if (!fails && (found != stored_.end() || it->second.from_peer)) {
    it->second.restoring = false;
    it->second.restored = true;
    it->second.fingerprint = (it->second.from_peer ? lent : found)->second.fingerprint;
    ++reads_done_;
    return;
  }
  restored.set_error_code(
      static_cast<int32_t>(fails ? absl::StatusCode::kDataLoss : absl::StatusCode::kNotFound));
  if (found != stored_.end()) {
    report.add_forgotten(found->first);
    stored_.erase(found);
  }
  blocks_.erase(it);
}

inline v1::TierReport SymbolicWorker::TakeOverDisk(const SymbolicWorker& other) {
  v1::TierReport report;
  writes_ = other.stored_;
  while (!writes_.empty()) EndWrite(writes_.begin()->first, report);
  return report;
}

inline void SymbolicWorker::Erase(const v1::Erase& erase, v1::TierReport& report) {
  v1::Erased& erased = *report.add_erased();
  erased.set_id(erase.id());
  for (auto it = stored_.begin(); it != stored_.end();) {
    const auto& named = erase.blocks().prefix_hash();
    const bool is_named = std::find(named.begin(), named.end(), it->first) != named.end();
    if (!erase.all() && !is_named && (!erase.has_owner() || owners_[it->first] != erase.owner())) {
      ++it;
      continue;
    }
    report.add_forgotten(it->first);
    erased.set_disk_blocks(erased.disk_blocks() + 1);
    it = stored_.erase(it);
  }
}

inline v1::TierReport SymbolicWorker::TakeTierReport(Disk how, uint64_t random) {
  v1::TierReport report;
  for (const v1::Erase& erase : std::exchange(erases_, {})) Erase(erase, report);
  const auto chance = [&](uint64_t one_in) {
    random = Mix(random, one_in);
    return random % one_in == 0;
  };
  std::vector<std::string> written;
  for (const auto& [hash, write] : writes_) {
    if (how == Disk::kDone || chance(2)) written.push_back(hash);
  }
  for (const std::string& hash : written) EndWrite(hash, report);
  std::vector<uint64_t> later;
  for (uint64_t id : std::exchange(restores_, {})) {
    if (how == Disk::kSome && chance(2)) {
      later.push_back(id);
    } else {
      const bool is_sound = sound_reads_ > 0;
      const bool fails = (!is_sound && failing_reads_ > 0) || (how == Disk::kSome && chance(8));
      int64_t& left = is_sound ? sound_reads_ : failing_reads_;
      left = std::max<int64_t>(0, left - 1);
      EndRead(id, fails, report);
    }
  }
  restores_.insert(restores_.begin(), later.begin(), later.end());
  return report;
}

}  // namespace kvasir::testing
