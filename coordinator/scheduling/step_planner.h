// Decides what one step computes: who decodes, whose prompt is read, who is admitted, who gives
// way. scheduler.h has the rules. One planner makes one plan; the scheduler makes a planner for
// every step. Thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "coordinator/scheduling/plan_builder.h"
#include "coordinator/scheduling/scheduler_events.h"
#include "coordinator/scheduling/scheduler_state.h"
#include "coordinator/time/clock.h"

namespace kvasir::coordinator {

class StepPlanner {
 public:
  // kAhead: an earlier plan is unanswered.
  enum class When { kAnswered, kAhead };

  StepPlanner(SchedulerState& state, When when, TimePoint now);

  // True when a plan may follow on `before`, which is unanswered.
  static bool MayPlanAhead(const SchedulerState& state, const UnansweredPlan& before);

  // Plans the step. Nothing when there is nothing to do. Called once.
  std::optional<PlannedStep> Plan(uint64_t step);
  // Progress of the sequences that the plan admits. Called once, after Plan.
  std::vector<Event> TakeEvents() { return std::move(events_); }

 private:
  // Treatment of a full block that is not published: others have an equal one, or it is of use to
  // this sequence alone.
  enum class Unpublished { kSeal, kLeaveOut };
  void SealFullBlocks(Sequence& sequence, Unpublished unpublished);
  // Writes the first `num_blocks` blocks of the sequence to disk, after the step.
  void PersistBlocks(const Sequence& sequence, int64_t num_blocks);
  void ReleaseEnded();

  void PlanDecodes();
  // False when the sequence itself was preempted.
  bool MakeRoomForToken(Sequence& sequence);
  Sequence& Youngest() const;
  // Puts the sequence at the head of the queue, and counts that if it runs.
  void Preempt(Sequence& sequence);
  void PreemptDamaged();
  void KeepFindable(const Sequence& sequence);

  // Gives short prompts up to half of the budget while a longer one is read.
  void PlanPassing();
  void AdmitShort();
  // At most `tokens` of the prompt are left to read.
  bool IsShort(Sequence& sequence, int64_t tokens) const;
  bool LeavesRoomFor(const Sequence& head, const Sequence& passing) const;
  void PlanPrompts();
  // Starts the sequence again after its later blocks, which it meets.
  void GoOnAfter(Sequence& sequence);

  // Begins to fetch blocks of prompts that other servers read, and have read further.
  void FetchFromElsewhere();
  // Admits those that wait for no block any more, unless their prompts are still read elsewhere.
  void AdmitRestored();
  // Asks peers for more, when they gave all that the sequence asked for. False when it does not.
  bool AskOn(Sequence& sequence);
  // Lets the ranks restore the sequence's blocks from the `begin`-th on, and its later blocks.
  void AddRestores(const Sequence& sequence, int64_t begin);
  void AdmitWaiting();
  // Another request restores a block that this one waits for.
  bool IsOnItsWay(const Sequence& sequence) const;
  // Admits the i-th waiting request, which leaves the queue, or steps over one that is to wait for
  // blocks. False when there is no room for it.
  bool AdmitOrSkip(size_t& i);
  void Admit(Sequence& sequence);
  enum class Reserved { kNoRoom, kReady, kRestoring, kLater };
  // Takes hold of the cached blocks among those that the sequence reads, and reserves the rest.
  // kRestoring: some of the rest come from disk or peers first. kLater: another request restores
  // them, or there are none yet of a prompt that is read elsewhere.
  Reserved TryReserve(Sequence& sequence);
  // Number of blocks that are left free when a request is admitted.
  int64_t SpareBlocks() const;

  SchedulerState& state_;
  const When when_;
  const TimePoint now_;
  PlanBuilder plan_;
  std::vector<Event> events_;
};

}  // namespace kvasir::coordinator
