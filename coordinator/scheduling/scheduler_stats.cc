// The numbers that a scheduler tells of itself, and whether they add up.
#include <algorithm>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"

#include "coordinator/scheduling/scheduler.h"
#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {

using kvstore::Block;
using kvstore::BlockId;

namespace {

bool IsReadElsewhere(const Sequence* sequence) { return sequence->read_elsewhere.has_value(); }

}  // namespace

std::vector<SequenceId> Scheduler::SequencesOf(const std::string* tenant) const {
  std::vector<SequenceId> ids;
  for (const Sequence* sequence : state_.sequences.OldestFirst()) {
    if (tenant == nullptr || sequence->spec.tenant == *tenant) ids.push_back(sequence->spec.id);
  }
  return ids;
}

SchedulerStats Scheduler::stats() const {
  SchedulerStats stats = state_.counters;
  stats.running = static_cast<int64_t>(state_.sequences.running().size());
  stats.waiting = std::ssize(state_.sequences.waiting());
  const std::vector<Sequence*> restoring = state_.restores.Sequences();
  const int64_t fetched_early = std::count_if(restoring.begin(), restoring.end(), IsReadElsewhere);
  stats.restoring = std::ssize(restoring) - fetched_early;
  stats.read_elsewhere = std::ssize(state_.sequences.elsewhere()) + fetched_early;
  stats.disk_set_aside = state_.restores.is_disk_set_aside();
  stats.peers_set_aside = state_.restores.are_peers_set_aside();
  stats.waiting_tokens = state_.sequences.waiting_tokens();
  stats.index = state_.blocks.index().stats();
  stats.stored = state_.restores.stored_stats();
  stats.pinned_host_blocks = state_.contexts.pinned_host_blocks();
  stats.pinned_disk_blocks = state_.contexts.pinned_disk_blocks();
  return stats;
}

absl::Status Scheduler::CheckIntegrity() const {
  const BlockBudget& blocks = state_.blocks;
  KVASIR_RETURN_IF_ERROR(blocks.index().CheckIntegrity());
  KVASIR_RETURN_IF_ERROR(state_.restores.CheckIntegrity());
  KVASIR_RETURN_IF_ERROR(state_.sequences.CheckIntegrity());
  int64_t reserved = 0;
  const std::vector<BlockId> of_contexts = state_.contexts.held();
  absl::flat_hash_set<BlockId> held(of_contexts.begin(), of_contexts.end());
  for (const BlockId id : state_.exchange.held()) held.insert(id);
  const auto count = [&](const Sequence& sequence) {
    reserved += sequence.reservation.num_blocks();
    for (const Block& block : sequence.blocks) held.insert(block.id());
    for (const Sequence::LaterBlock& later : sequence.later_blocks) held.insert(later.block.id());
  };
  absl::flat_hash_map<SequenceId, int64_t> planned_tokens;
  for (const UnansweredPlan& plan : unanswered_) {
    for (const PlannedRow& row : plan.rows) planned_tokens[row.id] += row.num_tokens;
  }
  bool plans_add_up = true;
  for (const Sequence* sequence : state_.sequences.OldestFirst()) {
    count(*sequence);
    plans_add_up &= sequence->unanswered_tokens == planned_tokens[sequence->spec.id];
  }
  for (const SequenceTable::Ended& ended : state_.sequences.ended()) count(*ended.sequence);
  const int64_t available = blocks.index().available_blocks();
  const int64_t index_held = blocks.index().stats().held_blocks;
  // A block keeps its whole prefix held, so the index may hold more than the sequences do.
  const bool blocks_add_up = reserved == blocks.reserved() && reserved <= available &&
                             index_held >= static_cast<int64_t>(held.size()) &&
                             (!held.empty() || index_held == 0);
  if (blocks_add_up && plans_add_up) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(
      "scheduler: reserved ", reserved, " (counted ", blocks.reserved(), ") of ", available,
      " available blocks; held ", held.size(), " (index ", index_held, "); ", unanswered_.size(),
      " plans unanswered, whose tokens ", plans_add_up ? "add up" : "do not add up"));
}

}  // namespace kvasir::coordinator
