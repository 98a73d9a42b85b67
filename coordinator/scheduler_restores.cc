// The part of the scheduler that deals with the ranks' disk tiers: what is stored there, writing
// behind finished requests, restoring for waiting ones.
#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

#include "coordinator/scheduler.h"
#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

using kvstore::Block;
using kvstore::PrefixHash;

absl::StatusOr<PrefixHash> ParseHash(int64_t rank, const std::string& bytes) {
  PrefixHash hash;
  if (bytes.size() != hash.size()) {
    return absl::InternalError(absl::StrCat("rank ", rank,
                                            " reports a stored block with a hash of ", bytes.size(),
                                            " bytes instead of ", hash.size()));
  }
  std::copy(bytes.begin(), bytes.end(), hash.begin());
  return hash;
}

}  // namespace

absl::Status Scheduler::OnTierReport(int64_t rank, const v1::TierReport& report, TimePoint now) {
  for (const v1::StoredBlock& block : report.stored()) {
    KVASIR_ASSIGN_OR_RETURN(const PrefixHash hash, ParseHash(rank, block.prefix_hash()));
    if (block.tokens_size() != kBlockTokens) {
      return absl::InternalError(absl::StrCat("rank ", rank, " reports a stored block of ",
                                              block.tokens_size(), " tokens"));
    }
    stored_.Stored(rank, hash, std::vector<int32_t>(block.tokens().begin(), block.tokens().end()));
  }
  for (const std::string& bytes : report.forgotten()) {
    KVASIR_ASSIGN_OR_RETURN(const PrefixHash hash, ParseHash(rank, bytes));
    stored_.Forgotten(rank, hash);
  }
  for (const v1::RestoredBlock& restored : report.restored()) OnRestored(restored, now);
  return absl::OkStatus();
}

// Writes behind what others may find. The ranks leave out what they store already, or never sealed
// because it equals a block that is cached.
void Scheduler::PersistBlocks(const Sequence& sequence, int64_t num_blocks,
                              v1::StepPlan& plan) const {
  if (!persists()) return;
  for (int64_t i = 0; i < num_blocks; ++i) {
    if (stored_.HeldByAll(sequence.hashes[static_cast<size_t>(i)])) continue;
    v1::BlockPersist& persist = *plan.add_persists();
    persist.set_block_id(static_cast<uint64_t>(sequence.blocks[static_cast<size_t>(i)].id().value));
    for (int32_t token : sequence.block_tokens(i)) {
      persist.add_tokens(static_cast<uint32_t>(token));
    }
  }
}

std::vector<PrefixHash> Scheduler::MatchStored(const Sequence& sequence,
                                               const kvstore::PrefixMatch& match, TimePoint now) {
  if (!persists() || sequence.restore_tried || now < disk_aside_until_) return {};
  const size_t cached = match.blocks.size();
  return stored_.Match(match.hashes.empty() ? sequence.scope : match.hashes.back(),
                       sequence.matchable().subspan(cached * static_cast<size_t>(kBlockTokens)),
                       static_cast<int64_t>(cached), sequence.decode_part);
}

void Scheduler::StartRestoring(Sequence& sequence, const std::vector<PrefixHash>& stored,
                               TimePoint now, v1::StepPlan& plan) {
  sequence.restore_tried = true;
  sequence.restores_begin = sequence.num_blocks();
  sequence.restores_pending = static_cast<int64_t>(stored.size());
  const bool on_trial = disk_pause_ > absl::ZeroDuration();
  sequence.restore_deadline =
      After(now, on_trial ? options_.disk_trial : options_.restore_patience);
  if (on_trial) disk_aside_until_ = After(now, disk_pause_);  // one request is enough
  restoring_.push_back(&sequence);
  for (const PrefixHash& hash : stored) {
    const int64_t index = sequence.num_blocks();
    const BlockId id = sequence.TakeBlock();
    sequence.hashes.push_back(hash);
    restores_[id] = {.sequence = &sequence, .index = index, .ranks_left = options_.num_ranks};
    restoring_hashes_.insert(hash);
    v1::BlockRestore& restore = *plan.add_restores();
    restore.set_block_id(static_cast<uint64_t>(id.value));
    restore.set_prefix_hash(hash.data(), hash.size());
  }
}

// A block that nobody waits for any more was dropped before this report came.
void Scheduler::OnRestored(const v1::RestoredBlock& restored, TimePoint now) {
  const auto it = restores_.find(BlockId(static_cast<int64_t>(restored.block_id())));
  if (it == restores_.end()) return;
  Restore& restore = it->second;
  Sequence& sequence = *restore.sequence;
  if (restored.error_code() != 0) {
    RestoreOnly(sequence, restore.index);
  } else if (--restore.ranks_left == 0) {
    disk_pause_ = absl::ZeroDuration();
    disk_aside_until_ = TimePoint();
    disk_answered_at_ = now;
    sequence.restore_deadline = After(now, options_.restore_patience);
    --sequence.restores_pending;
    restores_.erase(it);
  }
  if (sequence.restores_pending == 0) PublishRestored(sequence);
}

void Scheduler::GiveUpLateRestores(TimePoint now) {
  bool late = false;
  for (Sequence* sequence : restoring_) {
    if (sequence->restores_pending == 0 || now < sequence->restore_deadline) continue;
    late = true;
    ComputeRest(*sequence);
  }
  // A slow disk that serves others is still worth waiting for.
  if (late && now >= After(disk_answered_at_, options_.restore_patience)) SetDiskAside(now);
}

void Scheduler::SetDiskAside(TimePoint now) {
  disk_pause_ = std::clamp(2 * disk_pause_, options_.first_disk_pause, options_.longest_disk_pause);
  disk_aside_until_ = After(now, disk_pause_);
  for (Sequence* sequence : restoring_) {
    if (sequence->restores_pending > 0) ComputeRest(*sequence);
  }
}

void Scheduler::ComputeRest(Sequence& sequence) {
  int64_t first = sequence.num_blocks();
  for (const auto& [id, restore] : restores_) {
    if (restore.sequence == &sequence) first = std::min(first, restore.index);
  }
  RestoreOnly(sequence, first);
  PublishRestored(sequence);
}

std::optional<TimePoint> Scheduler::NextDeadline() const {
  std::optional<TimePoint> next;
  for (const Sequence* sequence : restoring_) {
    if (sequence->restores_pending == 0) continue;
    next = std::min(next.value_or(sequence->restore_deadline), sequence->restore_deadline);
  }
  return next;
}

// The sequence goes on with its first `num_blocks` blocks and computes the others.
void Scheduler::RestoreOnly(Sequence& sequence, int64_t num_blocks) {
  for (int64_t i = num_blocks; i < sequence.num_blocks(); ++i) {
    const BlockId id = sequence.blocks[static_cast<size_t>(i)].id();
    sequence.restores_pending -= static_cast<int64_t>(restores_.erase(id));
  }
  for (size_t i = static_cast<size_t>(num_blocks); i < sequence.hashes.size(); ++i) {
    restoring_hashes_.erase(sequence.hashes[i]);
  }
  sequence.hashes.resize(static_cast<size_t>(num_blocks));
  sequence.GiveBackBlocks(num_blocks);
}

// From here on others find them too. One that is refused is this sequence's own, like a block that
// it computed as another did.
void Scheduler::PublishRestored(Sequence& sequence) {
  for (size_t i = static_cast<size_t>(sequence.restores_begin); i < sequence.blocks.size(); ++i) {
    restoring_hashes_.erase(sequence.hashes[i]);
    index_->Publish({.block = sequence.blocks[i],
                     .before = i == 0 ? Block() : sequence.blocks[i - 1],
                     .parent = i == 0 ? sequence.scope : sequence.hashes[i - 1],
                     .hash = sequence.hashes[i],
                     .tokens = sequence.block_tokens(static_cast<int64_t>(i))});
  }
}

// It leaves the restoring ones, for whatever reason.
void Scheduler::ForgetRestores(Sequence& sequence) {
  restoring_.erase(std::find(restoring_.begin(), restoring_.end(), &sequence));
  for (size_t i = static_cast<size_t>(sequence.restores_begin); i < sequence.blocks.size(); ++i) {
    restores_.erase(sequence.blocks[i].id());
    restoring_hashes_.erase(sequence.hashes[i]);
  }
  sequence.restores_pending = 0;
}

}  // namespace kvasir::coordinator
