// Decides what every step computes. A pure object: no threads, no clock, no I/O; plans go out and
// replies come in as messages. One scheduler lives as long as one formation of the worker group.
// Called by the engine loop, the only thread that touches it. Thread-compatible.
//
// Policy. First come, first served, but short prompts pass a long one. Every sequence that is past
// its prompt decodes one token in every step; the rest of the step's tokens goes to prompts in
// order of admission, in chunks that end at multiples of 64 or at the prompt's end. While a prompt
// is read, up to half of that rest goes to other prompts of which no more is left to read (cached
// blocks need not be read), those that wait included: such a request waits for the step in flight
// and is read in the next, as long as a slot and blocks are free. The oldest prompt has at least
// the other half of every step, so that any number of short ones at most doubles the time that it
// takes; the head of the queue keeps a slot and its blocks. Beside decoding sequences chunks shrink
// with the context behind them, so that such a step takes no longer than a whole chunk behind 4,096
// tokens (but a chunk has at least 64 tokens): streams stutter alike however long the prompt. A
// request is admitted when blocks for its prompt and a few more are to be had. Its cached prefix is
// looked up then, not at arrival, so that requests which follow each other share more.
//
// Preemption. Answers grow, so blocks may run out. Then the youngest request gives up its own and
// goes back to the head of the queue with what it has generated; its full blocks stay findable in
// memory while there is room, and on disk. When it is admitted again it takes what it finds of
// them and computes the rest as it did the first time, to the same bits. The oldest is never
// preempted, and alone it fits: so all of them end.
//
// Disk. Where the prefix index ends, the chain goes on among the blocks that every rank has on
// disk. Those are restored first: the request holds its blocks and waits, others run on. A block
// that any rank cannot read, or not in time, is computed instead, with all behind it; a request
// asks for its blocks once. A disk that brings nothing for a time is set aside at once: all who
// wait for it compute their blocks, and only from time to time one request tries it again, for a
// short while. When a request ends its shareable blocks are written behind the steps.
//
// Blocks. A block filled by a step is sealed by the next plan after its answer and, unless its KV
// depends on where this prompt ended, published for others. Unsealed blocks live in the device tier
// of the ranks: no more of them than the device share.
//
// One step ahead. While a plan is unanswered the next one is made, so that the ranks need not wait
// between steps: its rows follow on what is planned, and need no token named, for the ranks sample
// them alike. A sequence that ends unforeseen has a row there in vain, whose result nobody gets. It
// is not made where the answer may change it, or for what only it would be needed for:
//   behind starts (a rank may miss blocks), where it would preempt or outgrow the device share,
//   while a prompt's chunk is computed that a waiting request may share, without rows of its own.
#pragma once

#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "coordinator/block_budget.h"
#include "coordinator/clock.h"
#include "coordinator/sequence.h"
#include "kvstore/index/prefix_index.h"
#include "kvstore/index/stored_index.h"
#include "proto/kvasir/v1/generation.pb.h"
#include "proto/kvasir/v1/worker.pb.h"

namespace kvasir::coordinator {

using kernels::BlockId;

struct ProgressEvent {
  SequenceId id;
  int64_t prompt_tokens = 0;
  int64_t processed_tokens = 0;
  int64_t cached_tokens = 0;
  std::optional<absl::Duration> eta = {};  // to the first token
};
struct TokenEvent {
  enum class Role { kInner, kLast, kStop };  // kStop: last, and a stop token

  SequenceId id;
  int64_t index = 0;  // among the generated ones
  int32_t token = 0;
  Role role = Role::kInner;
  std::optional<v1::TokenLogprobs> logprobs = {};  // when the request asked for them
};
// The last event of a sequence.
struct FinishEvent {
  SequenceId id;
  absl::Status status;
  v1::Finish summary;  // but for request_id; without a reason when the status is not OK
};
using Event = std::variant<ProgressEvent, TokenEvent, FinishEvent>;

struct SchedulerOptions {
  uint64_t group_epoch = 0;
  int64_t num_ranks = 1;
  int64_t device_blocks = 0;  // that every rank's device tier holds
  int64_t disk_blocks = 0;    // the same of the disk tier; 0: some rank has none
  // Attending to so many tokens is as much work as the rest of a token's layers.
  int64_t attention_parity_tokens = 0;
  // Why the ranks measure no attention mass; unspecified: they do.
  v1::MassUnmeasured mass_unmeasured = v1::MASS_UNMEASURED_UNSPECIFIED;
  int64_t vocab_size = 0;
  std::string weights_hash;
  std::string kv_form;
  int64_t max_num_seqs = 0;
  int64_t max_num_batched_tokens = 0;  // a multiple of 64
  int64_t max_queue_len = 0;           // requests that wait behind those that could start now
  // Prompt tokens of those that wait, unless it is one alone.
  int64_t max_queued_tokens = std::numeric_limits<int64_t>::max();
  bool enable_prefix_caching = true;
  // When none of a request's blocks came for so long, it computes the rest of them. A slow disk
  // still beats computing; a dead one must not hold requests up.
  absl::Duration restore_patience = absl::Seconds(10);
  // A disk that is set aside is tried again after the first of these, then after twice the time,
  // and so on to the second; the request that tries it waits for the third.
  absl::Duration first_disk_pause = absl::Seconds(5);
  absl::Duration longest_disk_pause = absl::Seconds(60);
  absl::Duration disk_trial = absl::Seconds(1);
};

struct SchedulerStats {
  int64_t running = 0;
  int64_t waiting = 0;
  int64_t restoring = 0;  // wait for blocks from disk
  bool disk_set_aside = false;
  int64_t waiting_tokens = 0;  // prompt tokens of those that wait
  int64_t prefix_queries = 0;  // prompt tokens of admitted requests, since the start
  int64_t prefix_hits = 0;     // of these, tokens found in the cache
  int64_t preempted_swap = 0;  // with a disk tier to go to
  int64_t preempted_recompute = 0;
  int64_t resumed_disk = 0;  // admitted again, with blocks from disk
  int64_t resumed_host = 0;  // from memory only
  int64_t resumed_recompute = 0;
  int64_t plans_ahead = 0;   // made while another was unanswered
  int64_t rows_in_vain = 0;  // of sequences that had ended when they were answered
  kvstore::PrefixIndexStats index;
  kvstore::StoredIndexStats stored;
};

class Scheduler {
 public:
  // INVALID_ARGUMENT for options that could never run anything.
  static absl::StatusOr<std::unique_ptr<Scheduler>> Create(
      const SchedulerOptions& options, std::unique_ptr<kvstore::PrefixIndex> index);
  ~Scheduler();

  // RESOURCE_EXHAUSTED when the queue is full, with a time to try again after, or when the request
  // could never fit the host tier.
  // REQUIRES: a prompt, max_tokens >= 1.
  absl::Status Add(SequenceSpec spec);

  // Ends a sequence for a reason from outside; nothing when it has ended already.
  std::optional<FinishEvent> Cancel(SequenceId id, const absl::Status& why, TimePoint now);
  // The text so far ends in a stop string: the sequence is done.
  std::optional<FinishEvent> StopEarly(SequenceId id, TimePoint now);

  struct Planned {
    std::optional<v1::StepPlan> plan;  // none: nothing to do, or not before the next answer
    std::vector<Event> events;
  };
  // Ranks carry plans out in their order. REQUIRES: fewer than kMostPlans are unanswered.
  Planned NextPlan(TimePoint now);
  static constexpr int64_t kMostPlans = 2;
  int64_t unanswered_plans() const { return static_cast<int64_t>(unanswered_.size()); }
  // When NextPlan has something to do though nothing else happens.
  std::optional<TimePoint> NextDeadline() const;

  // What a rank says of its disk tier, at any time. INTERNAL as OnReply.
  absl::Status OnTierReport(int64_t rank, const v1::TierReport& report, TimePoint now);

  // The ranks' common answer to the oldest unanswered plan. INTERNAL when it does not fit the plan:
  // then the group is not to be trusted, call FailAll.
  absl::StatusOr<std::vector<Event>> OnReply(const v1::StepReply& reply, TimePoint now);

  // The group is gone: ends every sequence. Nothing may be added or planned afterwards.
  std::vector<Event> FailAll(const absl::Status& why, TimePoint now);

  SchedulerStats stats() const;
  // Slots, blocks and reservations add up; nothing is held when nobody runs. For tests.
  absl::Status CheckIntegrity() const;

 private:
  struct PlannedRow {
    SequenceId id;
    int64_t slot = 0;
    int64_t num_tokens = 0;
    int64_t blocks_before = 0;
    bool sample = false;
    bool starts = false;
  };
  struct Unanswered {
    uint64_t step = 0;
    TimePoint planned_at;
    int64_t prefill_tokens = 0;
    std::vector<PlannedRow> rows;
    std::vector<int64_t> sealed;  // block ids
    bool starts_sequences = false;
  };
  // What is left of a step while it is planned.
  struct Budget {
    int64_t tokens = 0;
    int64_t device_blocks = 0;
    int64_t work = 0;  // of prompts: tokens times WorkPerToken
  };

  Scheduler(const SchedulerOptions& options, std::unique_ptr<kvstore::PrefixIndex> index);

  absl::Status CheckQueue(int64_t prompt_tokens) const;
  int64_t WaitingTokens() const;

  // Planning.
  bool MayPlanAhead() const;
  int64_t UnsealedBlocks() const;
  enum class Private { kSeal, kSkip };
  void SealFullBlocks(Sequence& sequence, Private unpublished, v1::StepPlan& plan);
  void LetGoOfRetired(v1::StepPlan& plan);
  void PlanDecodes(v1::StepPlan& plan, Budget& budget);
  // False when the sequence was preempted itself.
  bool MakeRoomForToken(Sequence& sequence, v1::StepPlan& plan);
  Sequence& Youngest() const;
  void Preempt(Sequence& sequence, v1::StepPlan& plan);
  void KeepFindable(Sequence& sequence, v1::StepPlan& plan);
  void CountResumed(const v1::RowAccounting& found);
  // Gives short prompts up to half of the budget while a longer one is read.
  void PlanPassing(TimePoint now, v1::StepPlan& plan, Budget& budget, std::vector<Event>& events);
  void AdmitShort(TimePoint now, v1::StepPlan& plan, Budget& budget, std::vector<Event>& events);
  // At most `tokens` of it are left to read.
  bool IsShort(Sequence& sequence, int64_t tokens) const;
  bool LeavesRoomFor(const Sequence& head, const Sequence& passing) const;
  bool HasRow(const Sequence& sequence) const;  // in the plan that is made
  int64_t SpareBlocks() const;
  void PlanPrompts(v1::StepPlan& plan, Budget& budget);
  void AdmitRestored(TimePoint now, v1::StepPlan& plan, Budget& budget, std::vector<Event>& events);
  void AdmitWaiting(TimePoint now, v1::StepPlan& plan, Budget& budget, std::vector<Event>& events);
  // Another request is being restored whose blocks it waits for.
  bool IsOnItsWay(const Sequence& sequence) const;
  // Takes the i-th of the queue out and admits it, or steps over one that is to wait for blocks;
  // false: there is no room for it.
  bool AdmitOrSkip(size_t& i, TimePoint now, v1::StepPlan& plan, Budget& budget,
                   std::vector<Event>& events);
  void Admit(Sequence& sequence, TimePoint now, v1::StepPlan& plan, Budget& budget,
             std::vector<Event>& events);
  static bool HasRoom(const Sequence& sequence, const Budget& budget);
  enum class Reserved { kNoRoom, kReady, kRestoring, kLater };
  Reserved TryReserve(Sequence& sequence, TimePoint now, v1::StepPlan& plan);
  Budget StepBudget() const;
  int64_t WorkPerToken(const Sequence& sequence) const;
  int64_t ChunkTokens(const Sequence& sequence, const Budget& budget) const;
  void AddRow(Sequence& sequence, int64_t num_tokens, v1::StepPlan& plan, Budget& budget);
  void AddStart(const Sequence& sequence, v1::StepPlan& plan) const;

  // The disk tier.
  bool persists() const { return options_.disk_blocks > 0 && options_.enable_prefix_caching; }
  // Its first `num_blocks` blocks.
  void PersistBlocks(const Sequence& sequence, int64_t num_blocks, v1::StepPlan& plan) const;
  std::vector<kvstore::PrefixHash> MatchStored(const Sequence& sequence,
                                               const kvstore::PrefixMatch& match, TimePoint now);
  void StartRestoring(Sequence& sequence, const std::vector<kvstore::PrefixHash>& stored,
                      TimePoint now, v1::StepPlan& plan);
  void OnRestored(const v1::RestoredBlock& restored, TimePoint now);
  void GiveUpLateRestores(TimePoint now);
  void SetDiskAside(TimePoint now);
  void ComputeRest(Sequence& sequence);  // of the blocks that were to be restored
  void RestoreOnly(Sequence& sequence, int64_t num_blocks);
  void ForgetRestores(Sequence& sequence);
  void PublishRestored(Sequence& sequence);

  // Replies.
  absl::Status CheckReply(const v1::StepReply& reply) const;
  absl::Status CheckResult(uint64_t step, const PlannedRow& row, const v1::RowResult& result) const;
  absl::Status CheckMissing(const v1::StepReply& reply) const;
  Unanswered TakeOldest();
  std::vector<Event> PlanAgainWithout(const v1::StepReply& reply, TimePoint now);
  void TakeBack(const PlannedRow& row);
  void BackToQueue(Sequence& sequence);
  void ApplyRow(const PlannedRow& row, const v1::RowResult& result, TimePoint now,
                std::vector<Event>& events);
  void ApplyToken(Sequence& sequence, const v1::RowResult& result, TimePoint now,
                  std::vector<Event>& events);
  void ReportProgress(Sequence& sequence, std::vector<Event>& events);
  ProgressEvent Progress(const Sequence& sequence) const;

  enum class Blocks { kKeep, kDiscard };
  FinishEvent End(Sequence& sequence, const absl::Status& status, v1::FinishReason reason,
                  Blocks blocks, TimePoint now);
  Sequence* Find(SequenceId id);

  const SchedulerOptions options_;
  const int64_t device_share_;  // unsealed blocks that may exist at a time
  const int64_t max_running_;
  // Outlives every handle and reservation, so it is declared before their holders.
  BlockBudget blocks_;
  kvstore::PrefixIndex* const index_;  // of blocks_

  absl::flat_hash_map<SequenceId, std::unique_ptr<Sequence>> sequences_;
  std::deque<Sequence*> waiting_;
  std::vector<Sequence*> restoring_;  // hold their blocks; in the order in which they began
  std::vector<Sequence*> running_;    // by id, so by age
  std::vector<int64_t> idle_slots_;

  kvstore::StoredIndex stored_;
  struct Restore {
    Sequence* sequence = nullptr;
    int64_t index = 0;       // of the block in the sequence
    int64_t ranks_left = 0;  // that have not restored it yet
  };
  absl::flat_hash_map<BlockId, Restore> restores_;             // of blocks on their way
  absl::flat_hash_set<kvstore::PrefixHash> restoring_hashes_;  // asked for and not yet published

  // Zero while the disk answers; else how long it is left alone, and until when.
  absl::Duration disk_pause_ = absl::ZeroDuration();
  TimePoint disk_aside_until_;
  TimePoint disk_answered_at_;

  // Sequences that ended; the next plan seals their full blocks and frees their slots.
  struct Retired {
    std::unique_ptr<Sequence> sequence;
    Blocks blocks = Blocks::kDiscard;
  };
  std::vector<Retired> retired_;

  std::deque<Unanswered> unanswered_;  // plans, by step; while one is made it is the last
  uint64_t step_ = 0;                  // of the last plan
  int64_t prompts_read_ = 0;           // since the start
  // The waiting request that last did not fit, and the unreserved blocks there were: it is tried
  // again when there are more.
  SequenceId did_not_fit_;
  int64_t did_not_fit_blocks_ = 0;

  TimePoint answered_at_;  // the last plan that was
  // Prompt tokens computed and the seconds it took, both fading.
  double recent_prefill_tokens_ = 0;
  double recent_prefill_seconds_ = 0;
  SchedulerStats counters_;  // of it the sums
};

}  // namespace kvasir::coordinator
