// The worker's engine: carries out one plan after another on one rank. It owns the KV store, the
// slots and the working memory, and borrows the model and the collective. Step hides everything
// between a plan and its reply. Called by the group member, on the engine thread.
// Thread-compatible.
//
// An error of Step ends the group: from then on the ranks may differ in what they know of their
// sequences, and every later Step returns the same error. An error of one row (NaN, corrupt or
// absent KV, no room) is reported in its result and in those of every later row of that sequence.
// There may be one later row, planned before the coordinator heard of the error.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "kernels/base/buffer.h"
#include "kvstore/kv_store.h"
#include "proto/kvasir/v1/worker.pb.h"
#include "worker/batch/step_batch.h"
#include "worker/engine/engine_step.h"
#include "worker/engine/kv_sizes.h"
#include "worker/engine/selector_table.h"
#include "worker/engine/slot_table.h"
#include "worker/engine/tier_reports.h"
#include "worker/model/activations.h"
#include "worker/model/transformer.h"
#include "worker/parallel/collective.h"

namespace kvasir::worker {

struct EngineOptions {
  uint64_t group_epoch = 0;
  int64_t max_num_seqs = 0;
  int64_t max_num_batched_tokens = 0;
  kernels::DType kv_dtype = kernels::DType::kFloat32;
  KvSizes kv = {};              // a size of 0 is chosen from the memory that the machine has left
  int64_t on_demand_bytes = 0;  // of KV that may lie on disk only while it is in use
  int64_t ranks_on_machine = 1;
  double gpu_memory_utilization = 0.9;
  // Identity of the KV: stored blocks of different models differ in these two. May be empty.
  std::string weights_hash = {};
  std::string kv_form = {};
  std::vector<v1::SparsityPolicy> policies;
  double mass_sample_rate = 0;
  // Memory of the host tier, which outlives the engine; null: its own.
  kvstore::HostMemory* memory = nullptr;
  // Called by Create with the name of the stage that begins. May be empty.
  std::function<void(absl::string_view stage)> on_stage = {};
};

// Returns this rank's part of the model's KV, as the store and the tier below it hold it.
kvstore::KvShard KvShardOf(const EngineOptions& options, const Transformer& model);

// Sees the logits of every row that samples, before sampling.
using LogitsTap =
    std::function<void(int64_t slot, int64_t position, std::span<const float> logits)>;

class Engine {
 public:
  // Takes all memory that steps within the options' limits need. All ranks call it together.
  // INVALID_ARGUMENT for policies that cannot be served, RESOURCE_EXHAUSTED for memory. The
  // references outlive the engine. `below` is the tier below the host tier, if any, made for
  // KvShardOf the options.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(
      const EngineOptions& options, Transformer& model, Collective& collective,
      std::unique_ptr<kvstore::Tier> below = nullptr);

  // Carries out the plan in the order of its fields. FAILED_PRECONDITION for a plan of another
  // epoch or an old step, INTERNAL for one that contradicts itself or earlier plans.
  absl::StatusOr<v1::StepReply> Step(const v1::StepPlan& plan);

  // Step in two parts. Replies come in the order of plans. Where the backend runs ahead, the next
  // plan may begin before the last one's reply is made, so that the device always has work: it
  // feeds sampled tokens from one step to the next itself. REQUIRES: for Begin, MayBegin; for
  // Finish, a step has begun.
  bool MayBegin(const v1::StepPlan& plan) const;
  absl::Status Begin(const v1::StepPlan& plan);
  absl::StatusOr<v1::StepReply> Finish();
  // Whether Finish would not wait. REQUIRES: a step has begun.
  bool IsOver() const {
    return steps_[finished_ % kMostSteps].works.empty() || model_.backend().IsOver();
  }

  // --- the tier below, between steps ---

  // Returns everything stored there, in reports of bounded size. Called before the first step.
  std::vector<v1::TierReport> Inventory() const { return ReportsOf(store_->Inventory()); }
  // Returns what happened to stored blocks since the last call; empty when nothing did.
  v1::TierReport TakeTierReport();
  // Whether blocks are on their way to or from it. Then poll it, also when there are no steps.
  bool TierIsBusy() const { return store_->TierIsBusy(); }
  void PollTier() { store_->PollTier(); }
  // Waits until every accepted write has ended; after a time, only for those under way. Does
  // nothing after a step that failed, because the store may be in the middle of it. Blocks not
  // written are computed again.
  void FlushTier();

  // Meter of the step that was finished last. REQUIRES: a step was finished, and at most one has
  // begun after it.
  const AttentionMeter& meter() const { return steps_[(finished_ - 1) % kMostSteps].meter; }
  // Seconds from the end of one step to the begin of the next, as the host sees them; 0 where the
  // next had begun. Of the step that was finished last. REQUIRES: two steps were finished.
  double gap_s() const { return gap_s_; }
  // Number of steps that began before all of their tokens were known.
  int64_t fed_steps() const { return fed_steps_; }
  const kvstore::KvStore& store() const { return *store_; }
  // Bytes reserved for selections that serve later steps.
  int64_t selection_memory_bytes() const { return slots_->selection_memory_bytes(); }
  int64_t block_bytes() const { return layout_.block_bytes(); }
  int64_t pages_per_block() const { return layout_.pages_per_block(); }
  void set_logits_tap(LogitsTap tap) { logits_tap_ = std::move(tap); }

 private:
  static constexpr uint64_t kMostSteps = 2;  // steps in flight

  Engine(const EngineOptions& options, Transformer& model, Collective& collective);

  absl::StatusOr<KvSizes> SizeTiers();
  absl::Status Init(std::unique_ptr<kvstore::Tier> below);
  // Whether a policy reads prompts without a selection.
  bool ReadsDensely(const SlotTableOptions& slots) const;
  bool AnyNeedsKeyCodes() const;
  absl::Status CheckPlan(const v1::StepPlan& plan) const;
  absl::Status CarryOut(const v1::StepPlan& plan, EngineStep& step);
  // Carries out the fields of the plan before starts.
  absl::Status CarryOutBlocks(const v1::StepPlan& plan);
  // Fills the reply's missing_blocks. Returns true when some rank misses a block: nothing is
  // computed then.
  absl::StatusOr<bool> AnyRankMisses(const v1::StepPlan& plan, v1::StepReply& reply);
  absl::Status Restore(const v1::BlockRestore& restore);
  absl::Status Import(const v1::BlockImport& import);
  absl::Status StartSequences(const v1::StepPlan& plan);
  absl::Status PrepareRows(const v1::StepPlan& plan, EngineStep& step,
                           std::vector<Truncation>& truncations);
  int64_t FedBy(const RowWork& work) const;
  // Whether the sequence's generated tokens reuse each other's selections.
  bool Remembers(const Sequence& sequence) const;
  // Gives the sequence memory for its selections if it will generate and its policy reuses them.
  void RememberSelections(Sequence& sequence, int64_t end) const;
  absl::Status Compute(EngineStep& step);
  absl::Status Collect(EngineStep& step);
  // Tells the batch how its tokens are sampled (AskForTokens) and stores the result (TakeTokens).
  void AskForTokens(EngineStep& step);
  void TakeTokens(EngineStep& step, const StepResult& result);
  void FailCorruptSequences();
  void FillReply(const EngineStep& step, v1::StepReply& reply) const;

  const EngineOptions options_;
  Transformer& model_;
  Collective& collective_;

  // Constant after Init.
  SelectorTable selectors_;
  LayerWindows windows_;  // of the model; refers to selectors_
  kernels::KvLayout layout_;

  std::unique_ptr<kvstore::KvStore> store_;
  std::unique_ptr<SlotTable> slots_;
  Activations activations_;
  LogitsTap logits_tap_;

  absl::Status broken_;
  uint64_t last_plan_ = 0;                   // step number of the last plan
  uint32_t kv_step_ = 0;                     // number of steps that the store has begun
  std::map<int64_t, CachedPrefix> started_;  // by slot, until the first row is answered
  v1::TierReport tier_report_;               // reports that the store does not make itself

  // Plan n is in steps_[n % kMostSteps], counted from 0.
  std::array<EngineStep, kMostSteps> steps_;
  uint64_t begun_ = 0, finished_ = 0;
  std::chrono::steady_clock::time_point last_finish_ = {};
  double gap_s_ = 0;
  int64_t fed_steps_ = 0;
};

}  // namespace kvasir::worker
