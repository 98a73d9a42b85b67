// The part of the scheduler that makes room when answers grow beyond the blocks there are.
#include <algorithm>
#include <utility>

#include "coordinator/scheduler.h"
#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {

using kvstore::Block;

bool Scheduler::MakeRoomForToken(Sequence& sequence, v1::StepPlan& plan) {
  if (!sequence.enters_block() || sequence.reservation.num_blocks() > 0) return true;
  while (blocks_.unreserved() <= 0) {
    KVASIR_CHECK(unanswered_plans() == 1);  // the one that is made: MayPlanAhead
    Sequence& victim = Youngest();
    Preempt(victim, plan);
    if (&victim == &sequence) return false;
  }
  return true;
}

// Of those that hold blocks. It may be the only one: blocks that it computed as another did are
// held twice, and no longer when it takes those that are cached.
Sequence& Scheduler::Youngest() const {
  Sequence* youngest = running_.back();
  for (Sequence* sequence : restoring_) {
    if (youngest->spec.id < sequence->spec.id) youngest = sequence;
  }
  return *youngest;
}

void Scheduler::Preempt(Sequence& sequence, v1::StepPlan& plan) {
  if (sequence.admitted()) {
    KeepFindable(sequence, plan);
    running_.erase(std::find(running_.begin(), running_.end(), &sequence));
    plan.add_free_slots(static_cast<uint32_t>(sequence.slot));
    idle_slots_.push_back(std::exchange(sequence.slot, -1));
    ++(persists() ? counters_.preempted_swap : counters_.preempted_recompute);
    ++sequence.preemptions;
    sequence.given_tokens = sequence.length();
  } else {
    ForgetRestores(sequence);
  }
  waiting_.push_front(&sequence);
  sequence.reservation.Release();
  sequence.blocks.clear();
  sequence.hashes.clear();
  sequence.computed = 0;
  sequence.restore_tried = false;
  did_not_fit_ = SequenceId();
}

// Its full blocks can be found again, by this sequence or by one that would compute the same, until
// their room is needed; on disk beyond that. NextPlan has sealed them before.
void Scheduler::KeepFindable(Sequence& sequence, v1::StepPlan& plan) {
  if (!options_.enable_prefix_caching) return;
  for (size_t i = 0; i < sequence.hashes.size(); ++i) {
    index_->Publish({.block = sequence.blocks[i],
                     .before = i == 0 ? Block() : sequence.blocks[i - 1],
                     .parent = i == 0 ? sequence.scope : sequence.hashes[i - 1],
                     .hash = sequence.hashes[i],
                     .tokens = sequence.block_tokens(static_cast<int64_t>(i))});
  }
  PersistBlocks(sequence, sequence.sealed_blocks(), plan);
}

void Scheduler::CountResumed(const v1::RowAccounting& found) {
  if (found.cached_disk_tokens() > 0) {
    ++counters_.resumed_disk;
  } else if (found.cached_device_tokens() + found.cached_host_tokens() > 0) {
    ++counters_.resumed_host;
  } else {
    ++counters_.resumed_recompute;
  }
}

}  // namespace kvasir::coordinator
