// The part of the scheduler that lets short prompts pass a long one that is being read.
#include <algorithm>

#include "coordinator/scheduler.h"

namespace kvasir::coordinator {
namespace {

// Requests of the queue that one plan looks at: what they have cached is looked up by hash.
constexpr int64_t kMostLookedAt = 16;

}  // namespace

void Scheduler::PlanPassing(TimePoint now, v1::StepPlan& plan, Budget& budget,
                            std::vector<Event>& events) {
  const auto reading = [](const Sequence* sequence) { return sequence->reading(); };
  const auto oldest = std::find_if(running_.begin(), running_.end(), reading);
  if (oldest == running_.end()) return;
  const Budget half = {.tokens = budget.tokens / 2,
                       .device_blocks = budget.device_blocks / 2,
                       .work = budget.work / 2};
  Budget left = half;
  for (auto it = oldest + 1; it != running_.end(); ++it) {
    Sequence& sequence = **it;
    if (!sequence.reading()) continue;
    const int64_t rest = sequence.given_tokens - sequence.planned_end();
    if (ChunkTokens(sequence, left) == rest) AddRow(sequence, rest, plan, left);
  }
  AdmitShort(now, plan, left, events);
  budget.tokens -= half.tokens - left.tokens;
  budget.device_blocks -= half.device_blocks - left.device_blocks;
  budget.work -= half.work - left.work;
}

void Scheduler::AdmitShort(TimePoint now, v1::StepPlan& plan, Budget& budget,
                           std::vector<Event>& events) {
  int64_t looked_at = 0;
  for (size_t i = 0; i < waiting_.size() && looked_at < kMostLookedAt; ++looked_at) {
    // One slot is left to the head of the queue.
    if (static_cast<int64_t>(running_.size() + restoring_.size()) + 1 >= max_running_) return;
    Sequence& sequence = *waiting_[i];
    if (IsOnItsWay(sequence) || !HasRoom(sequence, budget) || !IsShort(sequence, budget.tokens) ||
        (i > 0 && !LeavesRoomFor(*waiting_.front(), sequence))) {
      ++i;
      continue;
    }
    if (!AdmitOrSkip(i, now, plan, budget, events)) return;
  }
}

// All of a long prompt except its end may be cached. That is looked up again after another prompt
// was read, which may have been the same.
bool Scheduler::IsShort(Sequence& sequence, int64_t tokens) const {
  if (sequence.given_tokens <= tokens) return true;
  if (!options_.enable_prefix_caching || sequence.long_since == prompts_read_) return false;
  const kvstore::PrefixMatch match =
      index_->Match(sequence.scope, sequence.matchable(), sequence.decode_part);
  const auto cached = static_cast<int64_t>(match.blocks.size()) * kBlockTokens;
  if (sequence.given_tokens - cached <= tokens) return true;
  sequence.long_since = prompts_read_;
  return false;
}

bool Scheduler::LeavesRoomFor(const Sequence& head, const Sequence& passing) const {
  const int64_t spare = SpareBlocks();
  return head.blocks_to_read() + passing.blocks_to_read() + spare <= blocks_.unreserved();
}

bool Scheduler::HasRow(const Sequence& sequence) const {
  const std::vector<PlannedRow>& rows = unanswered_.back().rows;
  return std::any_of(rows.begin(), rows.end(),
                     [&](const PlannedRow& row) { return row.id == sequence.spec.id; });
}

}  // namespace kvasir::coordinator
