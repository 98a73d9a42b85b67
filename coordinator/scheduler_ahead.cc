// The part of the scheduler that says when a plan may be made ahead of an answer.
#include "coordinator/scheduler.h"

namespace kvasir::coordinator {

bool Scheduler::MayPlanAhead() const {
  const Unanswered& before = unanswered_.back();
  if (before.starts_sequences || (before.prefill_tokens > 0 && !waiting_.empty())) return false;
  int64_t rows = 0, new_blocks = 0, unreserved_blocks = 0;
  for (const Sequence* sequence : running_) {
    if (sequence->is_planned_out()) continue;
    ++rows;
    if (sequence->reading() || !sequence->enters_block()) continue;
    ++new_blocks;
    if (sequence->reservation.num_blocks() == 0) ++unreserved_blocks;
  }
  return rows > 0 && unreserved_blocks <= blocks_.unreserved() &&
         UnsealedBlocks() + new_blocks <= device_share_;
}

int64_t Scheduler::UnsealedBlocks() const {
  int64_t blocks = 0;
  for (const Sequence* sequence : running_) blocks += sequence->unsealed_blocks();
  return blocks;
}

}  // namespace kvasir::coordinator
