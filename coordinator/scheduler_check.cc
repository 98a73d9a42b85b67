// The scheduler's own bookkeeping, checked.
#include <algorithm>
#include <cstdint>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"

#include "coordinator/scheduler.h"
#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {

using kvstore::Block;

absl::Status Scheduler::CheckIntegrity() const {
  KVASIR_RETURN_IF_ERROR(index_->CheckIntegrity());
  int64_t reserved = 0;
  absl::flat_hash_set<int64_t> held;
  absl::flat_hash_set<int64_t> slots(idle_slots_.begin(), idle_slots_.end());
  size_t num_slots = idle_slots_.size();
  const auto count = [&](const Sequence& sequence) {
    reserved += sequence.reservation.num_blocks();
    for (const Block& block : sequence.blocks) held.insert(block.id().value);
    if (!sequence.admitted()) return;
    slots.insert(sequence.slot);
    ++num_slots;
  };
  for (const auto& [id, sequence] : sequences_) count(*sequence);
  for (const Retired& retired : retired_) count(*retired.sequence);
  const kvstore::PrefixIndexStats index = index_->stats();
  const bool slots_add_up =
      slots.size() == num_slots && num_slots == static_cast<size_t>(options_.max_num_seqs);
  // Blocks of a prefix stay held with those behind them, so the index may hold more than we do.
  const bool blocks_add_up = reserved == blocks_.reserved() &&
                             reserved <= index_->available_blocks() &&
                             index.held_blocks >= static_cast<int64_t>(held.size()) &&
                             (!held.empty() || index.held_blocks == 0);
  const bool sequences_add_up =
      sequences_.size() == running_.size() + waiting_.size() + restoring_.size();
  size_t pending = 0;
  for (const Sequence* sequence : restoring_) {
    pending += static_cast<size_t>(sequence->restores_pending);
  }
  const bool restores_add_up =
      pending == restores_.size() && (pending == 0) == restoring_hashes_.empty();
  absl::flat_hash_map<SequenceId, int64_t> planned_tokens;
  for (const Unanswered& plan : unanswered_) {
    for (const PlannedRow& row : plan.rows) planned_tokens[row.id] += row.num_tokens;
  }
  const bool plans_add_up =
      std::all_of(sequences_.begin(), sequences_.end(), [&](const auto& entry) {
        return entry.second->unanswered_tokens == planned_tokens[entry.first];
      });
  if (slots_add_up && blocks_add_up && sequences_add_up && restores_add_up && plans_add_up) {
    return absl::OkStatus();
  }
  return absl::InternalError(absl::StrCat(
      "scheduler: ", sequences_.size(), " sequences, ", running_.size(), " running, ",
      waiting_.size(), " waiting, ", restoring_.size(), " restoring, ", pending,
      " blocks pending (", restores_.size(), " awaited), ", retired_.size(), " retired; ",
      num_slots, " slots (", slots.size(), " different) of ", options_.max_num_seqs, "; reserved ",
      reserved, " (counted ", blocks_.reserved(), ") of ", index_->available_blocks(),
      " available; held ", held.size(), " (index ", index.held_blocks, "); ", unanswered_.size(),
      " plans unanswered, whose tokens ", plans_add_up ? "add up" : "do not add up"));
}

}  // namespace kvasir::coordinator
