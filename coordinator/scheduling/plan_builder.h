// One step while it is planned: what the plan says so far, and how much more fits. Commit yields
// the plan for the ranks and the record that their answer is held against. Nothing is known of a
// step that is not committed, except in the sequences that AddRow was given.
//
// Made by the step planner for every step. Thread-compatible.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

#include "coordinator/scheduling/scheduler_options.h"
#include "coordinator/scheduling/sequence.h"
#include "coordinator/time/clock.h"
#include "proto/kvasir/v1/worker.pb.h"

namespace kvasir::coordinator {

// The room that is left in a step.
struct StepBudget {
  int64_t tokens = 0;
  int64_t device_blocks = 0;
  int64_t work = 0;  // of prompts: the sum over tokens of the tokens that they attend to

  StepBudget Half() const {
    return {.tokens = tokens / 2, .device_blocks = device_blocks / 2, .work = work / 2};
  }
  friend StepBudget operator+(const StepBudget& a, const StepBudget& b) {
    return {.tokens = a.tokens + b.tokens,
            .device_blocks = a.device_blocks + b.device_blocks,
            .work = a.work + b.work};
  }
  friend StepBudget operator-(const StepBudget& a, const StepBudget& b) {
    return {.tokens = a.tokens - b.tokens,
            .device_blocks = a.device_blocks - b.device_blocks,
            .work = a.work - b.work};
  }
};

// Tokens [begin, begin + num_tokens) of one sequence, computed in one step.
struct PlannedRow {
  SequenceId id;
  int64_t slot = 0;
  int64_t begin = 0;
  int64_t num_tokens = 0;
  int64_t blocks_before = 0;                 // number of blocks that the sequence had
  std::vector<kvstore::BlockId> new_blocks;  // blocks that the tokens enter
  bool sample = false;                       // samples the token after the last computed one
  int64_t score_begin = 0;                   // positions that are scored: [score_begin, score_end)
  int64_t score_end = 0;
  int64_t top_count = 0;  // most probable tokens reported for each of them
  bool starts = false;    // the first row of a sequence on the ranks
  bool observe = false;   // the ranks tell which pages it selects
};

// The record of a plan that the ranks have not answered yet.
struct UnansweredPlan {
  uint64_t step = 0;
  TimePoint planned_at;
  int64_t prefill_tokens = 0;
  std::vector<PlannedRow> rows;
  std::vector<kvstore::BlockId> sealed;
  bool starts_sequences = false;

  // INTERNAL when the results of `reply` are not those of the rows.
  absl::Status CheckResults(const v1::StepReply& reply, int64_t vocab_size) const;
};

struct PlannedStep {
  v1::StepPlan plan;
  UnansweredPlan unanswered;
};

class PlanBuilder {
 public:
  // With `decodes`, the work of prompts is bounded, so that decoding sequences wait no longer than
  // for a chunk at a short context. `options` outlives the builder.
  PlanBuilder(const SchedulerOptions& options, TimePoint now, bool decodes);

  const StepBudget& budget() const { return budget_; }
  void set_budget(const StepBudget& budget) { budget_ = budget; }
  void set_device_blocks(int64_t device_blocks) { budget_.device_blocks = device_blocks; }

  // Number of tokens of the sequence's next chunk: it ends at a multiple of 64 or at the prompt's
  // end. 0 when there is no room for one.
  int64_t ChunkTokens(const Sequence& sequence) const;
  // The first chunk of the sequence is not empty, however much of its prompt is cached.
  bool HasRoomFor(const Sequence& sequence) const;
  bool HasRow(const Sequence& sequence) const;

  // Adds a row of the next `num_tokens` tokens and takes the blocks that they enter.
  // REQUIRES: a block is reserved or unreserved for each of them.
  void AddRow(Sequence& sequence, int64_t num_tokens);
  // Adds the sequence to those on the ranks, with its first chunk. REQUIRES: HasRoomFor.
  void AddStart(Sequence& sequence);
  void AddFreeSlot(int64_t slot);
  // Seals or stores the index-th block of the sequence, whose hash is known.
  void AddSeal(const Sequence& sequence, int64_t index);
  void AddPersist(const Sequence& sequence, int64_t index);
  void AddPersist(kvstore::BlockId id, absl::Span<const int32_t> tokens);
  void AddExport(v1::BlockExport block) { *plan_.add_exports() = std::move(block); }
  void AddImport(v1::BlockImport block) { *plan_.add_imports() = std::move(block); }
  void AddErase(v1::Erase erase) { *plan_.add_erases() = std::move(erase); }
  void AddDiskPin(const kvstore::PrefixHash& hash) {
    plan_.add_disk_pins(hash.data(), hash.size());
  }
  void AddDiskUnpin(const kvstore::PrefixHash& hash) {
    plan_.add_disk_unpins(hash.data(), hash.size());
  }
  void AddRestore(const Sequence& sequence, kvstore::BlockId id, const kvstore::PrefixHash& hash);
  void AddDrops(const std::vector<kvstore::BlockId>& blocks);

  // Ends the building. Nothing when the plan would not tell the ranks anything.
  std::optional<PlannedStep> Commit(uint64_t step);

 private:
  int64_t WorkPerToken(const Sequence& sequence) const;
  bool IsEmpty() const;

  const SchedulerOptions& options_;
  StepBudget budget_;
  v1::StepPlan plan_;  // without rows, epoch and step: Commit adds them
  UnansweredPlan unanswered_;
};

}  // namespace kvasir::coordinator
