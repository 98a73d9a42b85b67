// Decides what every step computes. A pure object: no threads, no clock, no I/O. Plans go out and
// replies come in as messages. One scheduler lives as long as one formation of the worker group.
// Called by the engine loop, the only thread that touches it. Thread-compatible.
//
// The scheduler hands plans out and takes their answers. Its parts, from the inside out:
//   Sequence, SequenceTable    one request; all of them, and the states they are in
//   BlockBudget, RestoreBook   the blocks that may be handed out; those on the ranks' disks
//   PlanBuilder, StepPlanner   one step: what is in it and what still fits; who gets what
//
// Policy. First come, first served, except that short prompts pass a long one. Every sequence that
// is past its prompt decodes one token in every step. The rest of the step's tokens goes to prompts
// in order of admission, in chunks that end at multiples of 64 or at the prompt's end. While a
// prompt is read, up to half of that rest goes to other prompts that have no more than that left to
// read (cached blocks need not be read), waiting ones included: such a request waits for the step
// in flight and is read in the next, as long as a slot and blocks are free. The oldest prompt has
// at least the other half of every step, so that any number of short ones at most doubles the time
// that it takes. The head of the queue keeps a slot and its blocks. Beside decoding sequences
// chunks shrink with the length of their context, so that such a step takes no longer than a whole
// chunk after 4,096 tokens (a chunk has at least 64 tokens): streams stutter alike however long the
// prompt. A request is admitted when blocks for its prompt and a few more are available. Its cached
// prefix is looked up then, not at arrival, so that requests which follow each other share more.
//
// Preemption. Answers grow, so blocks may run out. Then the youngest request gives up its own and
// goes back to the head of the queue with the tokens it has generated. Its full blocks stay
// findable in memory while there is room, and on disk. When it is admitted again it takes the ones
// that it finds and computes the rest as it did the first time, to the same bits. The oldest is
// never preempted, and alone it fits: so all of them end.
//
// Loss. When the group is lost, all its requests are preempted with it. The scheduler of the next
// group takes them over in the order of their arrival. Plans without an answer are forgotten: their
// tokens are computed again, to the same bits, so that nobody can tell.
//
// Damage. Where a rank finds KV of a request damaged, the request is preempted, and what was lost
// is computed again. If that happens again before another token, the request ends.
//
// Disk. restore_book.h says how blocks come back. When a request ends, its shareable blocks are
// written while later steps run.
//
// Blocks. A block filled by a step is sealed by the next plan after the step's answer and, unless
// its KV depends on where this prompt ended, published for others. Unsealed blocks live in the
// device tier of the ranks: no more of them than the device share.
//
// One step ahead. While a plan is unanswered the next one is made, so that the ranks need not wait
// between steps. Its rows follow on those that are planned and need not name tokens, for the ranks
// sample them alike. A sequence that ends unforeseen has a row there in vain, whose result nobody
// gets. No plan is made ahead where the answer may change it, or where only the answer makes it
// useful:
//   after starts (a rank may miss blocks); where it would preempt or outgrow the device share;
//   while a prompt's chunk is computed that a waiting request may share; without rows of its own;
//   where KV of a request is damaged;
//   where blocks of contexts are to be pinned, moved or erased.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "coordinator/scheduling/plan_builder.h"
#include "coordinator/scheduling/scheduler_events.h"
#include "coordinator/scheduling/scheduler_options.h"
#include "coordinator/scheduling/scheduler_state.h"
#include "coordinator/scheduling/sequence.h"
#include "coordinator/scheduling/survivors.h"
#include "coordinator/time/clock.h"
#include "kvstore/index/prefix_index.h"
#include "proto/kvasir/v1/generation.pb.h"
#include "proto/kvasir/v1/worker.pb.h"

namespace kvasir::coordinator {

class Scheduler {
 public:
  // INVALID_ARGUMENT for options that could never run anything.
  static absl::StatusOr<std::unique_ptr<Scheduler>> Create(
      const SchedulerOptions& options, std::unique_ptr<kvstore::PrefixIndex> index);

  // RESOURCE_EXHAUSTED when the queue is full, with a time to try again after, or when the request
  // could never fit the host tier.
  // REQUIRES: a prompt, max_tokens >= 1.
  absl::Status Add(SequenceSpec spec);

  // Ends a sequence for a reason from outside. Nothing when it has ended already.
  std::optional<FinishEvent> Cancel(SequenceId id, const absl::Status& why, TimePoint now);
  // Ends a sequence because its text so far ends in a stop string.
  std::optional<FinishEvent> StopEarly(SequenceId id, TimePoint now);

  // Another server, which reads the sequence's prompt, has sealed so many of its first tokens. The
  // next plan asks peers for them. Nothing when the sequence has ended, or nobody else reads it.
  void ReadElsewhere(SequenceId id, int64_t sealed_tokens);
  // kFailed: the server has perhaps read nothing.
  enum class Elsewhere { kRead, kFailed };
  // The other server has ended: what did not come from it, and does not come yet, is read here.
  void EndReadElsewhere(SequenceId id, Elsewhere how, TimePoint now);

  // The next row of the sequence tells which pages it selects. Nothing when it has ended.
  void Observe(SequenceId id);

  // Pins, demotes and erases blocks of contexts, from the next plan on.
  ContextBlocks& contexts() { return state_.contexts; }
  // Takes bytes of blocks from the ranks and gives them some, likewise.
  ContextExchange& exchange() { return state_.exchange; }
  // The sequences of a tenant, or all (null), that have not ended.
  std::vector<SequenceId> SequencesOf(const std::string* tenant) const;
  bool persists() const { return state_.options.persists(); }

  struct Planned {
    std::optional<v1::StepPlan> plan;  // none: nothing to do, or not before the next answer
    std::vector<Event> events;
  };
  // Ranks carry plans out in their order. REQUIRES: fewer than kMostPlans are unanswered.
  Planned NextPlan(TimePoint now);
  static constexpr int64_t kMostPlans = 2;
  int64_t unanswered_plans() const { return static_cast<int64_t>(unanswered_.size()); }
  // The time at which NextPlan has something to do though nothing else happens.
  std::optional<TimePoint> NextDeadline() const { return state_.restores.NextDeadline(); }

  // Takes what a rank says of its disk tier, at any time. INTERNAL as in OnReply.
  absl::Status OnTierReport(int64_t rank, const v1::TierReport& report, TimePoint now);

  // Takes the ranks' common answer to the oldest unanswered plan. INTERNAL when it does not fit the
  // plan: then the group is not to be trusted, call GiveUp.
  absl::StatusOr<std::vector<Event>> OnReply(const v1::StepReply& reply, TimePoint now);

  // Preempts all sequences and gives them up, because the group is gone. Nothing may be added or
  // planned afterwards.
  Survivors GiveUp();
  // Takes the sequences of the group before this one over. Ends those that this group would answer
  // otherwise, with UNAVAILABLE, or cannot hold. REQUIRES: nothing was added before.
  std::vector<Event> TakeOver(Survivors survivors, TimePoint now);

  SchedulerStats stats() const;
  // Slots, blocks and reservations add up; nothing is held when nobody runs. For tests.
  absl::Status CheckIntegrity() const;

 private:
  using Blocks = SequenceTable::Blocks;

  Scheduler(const SchedulerOptions& options, std::unique_ptr<kvstore::PrefixIndex> index)
      : state_(options, std::move(index)) {}

  absl::Status CheckQueue(int64_t prompt_tokens) const;
  // RESOURCE_EXHAUSTED when the host tier could never hold the sequence.
  absl::Status CheckFits(const Sequence& sequence) const;
  // Start of the sequence's chain of hashes, which depends on the group's weights and KV.
  kvstore::PrefixHash ScopeOf(const SequenceSpec& spec) const {
    return state_.contexts.ScopeOf(spec.tenant, spec.policy.prefill);
  }
  FinishEvent End(Sequence& sequence, const absl::Status& status, v1::FinishReason reason,
                  Blocks blocks, TimePoint now);

  absl::Status CheckReply(const v1::StepReply& reply) const;
  absl::Status CheckMissing(const v1::StepReply& reply) const;
  UnansweredPlan TakeOldest();
  // Some rank misses blocks that the oldest plan starts on, so no rank carried it out.
  std::vector<Event> PlanWithout(const v1::StepReply& reply, TimePoint now);
  void TakeBack(const PlannedRow& row);
  void TakeBackStart(Sequence& sequence);
  void ApplyRow(const PlannedRow& row, const v1::RowResult& result, TimePoint now,
                std::vector<Event>& events);
  void OnRowError(Sequence& sequence, const absl::Status& error, TimePoint now,
                  std::vector<Event>& events);
  void ApplyToken(Sequence& sequence, const v1::RowResult& result, TimePoint now,
                  std::vector<Event>& events);
  void CountResumed(const v1::RowAccounting& found);

  SchedulerState state_;
  std::deque<UnansweredPlan> unanswered_;  // by step
  uint64_t step_ = 0;                      // of the last plan
  TimePoint answered_at_;                  // time of the last answer
};

}  // namespace kvasir::coordinator
