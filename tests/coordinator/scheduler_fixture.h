// The fixture that all tests of the scheduler share: one scheduler and one rank on paper, which
// check each other.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "coordinator/scheduling/scheduler.h"
#include "tests/support/symbolic_worker.h"

namespace kvasir::coordinator {

using kvasir::testing::SymbolicWorker;
using kvasir::testing::SymbolicWorkerOptions;

inline constexpr int64_t kVocab = 50;

inline SchedulerOptions Options(const SymbolicWorkerOptions& worker) {
  return {.group_epoch = 3,
          .device_blocks = worker.device_blocks,
          .disk_blocks = worker.disk_blocks,
          .has_peers = worker.has_peers,
          .vocab_size = worker.vocab_size,
          .weights_hash = std::string(32, 'w'),
          .kv_form = "rotated/float32",
          .max_num_seqs = worker.max_num_seqs,
          .max_num_batched_tokens = worker.max_num_batched_tokens,
          .max_queue_len = 1000,
          .enable_prefix_caching = true};
}

inline ResolvedPolicy DensePolicy() {
  ResolvedPolicy policy;
  policy.prefill.mutable_all();
  policy.decode.mutable_all();
  return policy;
}

inline ResolvedPolicy SparsePolicy(uint32_t tail_tokens) {
  ResolvedPolicy policy = DensePolicy();
  policy.index = 1;
  policy.decode.mutable_quest();
  policy.decode.set_window_tokens(64);
  policy.decode.set_token_budget(128);
  policy.tail_tokens = tail_tokens;
  return policy;
}

inline std::vector<int32_t> Prompt(int64_t length, int32_t seed = 1) {
  std::vector<int32_t> prompt;
  std::minstd_rand random(static_cast<uint32_t>(seed));
  for (int64_t i = 0; i < length; ++i) prompt.push_back(static_cast<int32_t>(random() % kVocab));
  return prompt;
}

// One scheduler and one rank on paper.
class SchedulerTest : public ::testing::Test {
 protected:
  void Make(const SymbolicWorkerOptions& worker) { Make(worker, Options(worker)); }
  void Make(const SymbolicWorkerOptions& worker, const SchedulerOptions& options) {
    worker_ = std::make_unique<SymbolicWorker>(worker);
    auto scheduler = Scheduler::Create(options, kvstore::PrefixIndex::Create(worker.host_blocks));
    ASSERT_TRUE(scheduler.ok()) << scheduler.status();
    scheduler_ = *std::move(scheduler);
  }

  SequenceSpec Spec(std::vector<int32_t> prompt, int64_t max_tokens) {
    return {.id = SequenceId(next_id_++),
            .prompt = std::move(prompt),
            .max_tokens = max_tokens,
            .sampling = {},
            .policy = DensePolicy(),
            .tenant = {},
            .arrival = now_};
  }
  SequenceId Add(SequenceSpec spec) {
    const SequenceId id = spec.id;
    tokens_[id] = spec.answer;
    const absl::Status status = scheduler_->Add(std::move(spec));
    EXPECT_TRUE(status.ok()) << status;
    return id;
  }

  // Plans, lets the rank run the plan, applies the reply. False when there was nothing to do.
  bool Step() {
    Scheduler::Planned planned = scheduler_->NextPlan(now_);
    Collect(std::move(planned.events));
    if (!planned.plan.has_value()) return false;
    plan_ = *planned.plan;
    absl::StatusOr<v1::StepReply> reply = worker_->Execute(plan_);
    EXPECT_TRUE(reply.ok()) << reply.status() << "\n" << plan_.ShortDebugString().substr(0, 2000);
    if (!reply.ok()) return false;
    now_ += std::chrono::milliseconds(100);
    absl::StatusOr<std::vector<Event>> events = scheduler_->OnReply(*reply, now_);
    EXPECT_TRUE(events.ok()) << events.status();
    if (!events.ok()) return false;
    Collect(*std::move(events));
    EXPECT_EQ(scheduler_->CheckIntegrity(), absl::OkStatus());
    return true;
  }
  // As Step, but one row fails.
  void FailRow(int row, absl::StatusCode code) {
    Scheduler::Planned planned = scheduler_->NextPlan(now_);
    Collect(std::move(planned.events));
    absl::StatusOr<v1::StepReply> reply = worker_->Execute(*planned.plan);
    ASSERT_TRUE(reply.ok()) << reply.status();
    FailRow(row, code, *reply);
    Collect(*scheduler_->OnReply(*reply, now_));
    ASSERT_EQ(scheduler_->CheckIntegrity(), absl::OkStatus());
  }
  static void FailRow(int row, absl::StatusCode code, v1::StepReply& reply) {
    v1::RowResult& result = *reply.mutable_results(row);
    result.clear_token_id();
    result.set_error_code(static_cast<int>(code));
    result.set_error_message("on purpose");
  }
  void RunUntilIdle() {
    for (;;) {
      DeliverTierReport();
      if (!Step()) return;
    }
  }
  // The rank's disk does all that it was asked, and reports so to the scheduler.
  void DeliverTierReport() {
    const v1::TierReport report = worker_->TakeTierReport(SymbolicWorker::Disk::kDone);
    ASSERT_EQ(scheduler_->OnTierReport(0, report, now_), absl::OkStatus());
    ASSERT_EQ(scheduler_->CheckIntegrity(), absl::OkStatus());
  }
  // Starts another process with the same disk, and forms another group.
  void Restart(const SymbolicWorkerOptions& options) { Restart(options, Options(options)); }
  void Restart(const SymbolicWorkerOptions& worker, const SchedulerOptions& options) {
    const std::unique_ptr<SymbolicWorker> before = std::move(worker_);
    Make(worker, options);
    const v1::TierReport stored = worker_->TakeOverDisk(*before);
    ASSERT_EQ(scheduler_->OnTierReport(0, stored, now_), absl::OkStatus());
  }

  // Loses the group, and gives its sequences to the next one, which starts as Restart does. Returns
  // the number of sequences that were preempted. Nobody is to blame for the loss.
  int64_t Survive(const SymbolicWorkerOptions& worker) { return Survive(worker, Options(worker)); }
  int64_t Survive(const SymbolicWorkerOptions& worker, SchedulerOptions options) {
    Survivors survivors = scheduler_->GiveUp();
    EXPECT_EQ(scheduler_->CheckIntegrity(), absl::OkStatus());
    EXPECT_EQ(scheduler_->stats().index.held_blocks, 0);
    const int64_t preempted = scheduler_->stats().preempted_loss;
    options.group_epoch = ++epoch_;
    Restart(worker, options);
    Collect(scheduler_->TakeOver(std::move(survivors), now_));
    return preempted;
  }

  void Collect(std::vector<Event> events) {
    for (Event& event : events) {
      if (auto* token = std::get_if<TokenEvent>(&event)) {
        EXPECT_FALSE(finished_.contains(token->id));
        EXPECT_EQ(token->index, static_cast<int64_t>(tokens_[token->id].size()));
        tokens_[token->id].push_back(token->token);
      } else if (auto* progress = std::get_if<ProgressEvent>(&event)) {
        EXPECT_FALSE(finished_.contains(progress->id));
        progress_[progress->id].push_back(*progress);
      } else if (auto* scores = std::get_if<PromptLogprobsEvent>(&event)) {
        EXPECT_FALSE(finished_.contains(scores->id));
        EXPECT_TRUE(tokens_[scores->id].empty());
        TakeScores(scores->logprobs, scores_[scores->id]);
      } else if (auto* selection = std::get_if<SelectionEvent>(&event)) {
        EXPECT_FALSE(finished_.contains(selection->id));
        ++observed_[selection->id];
      } else {
        auto& finish = std::get<FinishEvent>(event);
        EXPECT_FALSE(finished_.contains(finish.id));
        finished_.emplace(finish.id, finish);
      }
    }
  }
  // Adds one message to those before it, which it must follow without a gap.
  static void TakeScores(const v1::PromptLogprobs& scores, std::vector<float>& all) {
    EXPECT_EQ(scores.index(), all.size() + 1);
    EXPECT_EQ(scores.has_first_token_id(), all.empty());
    ASSERT_EQ(scores.token_ids_size(), scores.logprobs_size());
    for (int i = 0; i < scores.logprobs_size(); ++i) {
      EXPECT_EQ(scores.logprobs(i),
                SymbolicWorker::ScoreOf(int64_t{scores.index()} + i,
                                        static_cast<int32_t>(scores.token_ids(i))));
    }
    all.insert(all.end(), scores.logprobs().begin(), scores.logprobs().end());
  }
  static std::vector<float> ExpectedScores(const std::vector<int32_t>& prompt) {
    std::vector<float> scores;
    for (size_t i = 1; i < prompt.size(); ++i) {
      scores.push_back(SymbolicWorker::ScoreOf(static_cast<int64_t>(i), prompt[i]));
    }
    return scores;
  }
  std::vector<int32_t> Expected(const SequenceSpec& spec) const {
    return SymbolicWorker::ExpectedTokens(spec.prompt, spec.max_tokens, spec.sampling, kVocab);
  }

  TimePoint now_ = TimePoint() + std::chrono::hours(1);
  int64_t next_id_ = 0;
  uint64_t epoch_ = 3;  // as in Options
  std::unique_ptr<SymbolicWorker> worker_;
  std::unique_ptr<Scheduler> scheduler_;
  v1::StepPlan plan_;
  std::map<SequenceId, std::vector<int32_t>> tokens_;
  std::map<SequenceId, std::vector<ProgressEvent>> progress_;
  std::map<SequenceId, std::vector<float>> scores_;  // of the prompts' tokens from the second on
  std::map<SequenceId, FinishEvent> finished_;
  std::map<SequenceId, int64_t> observed_;  // number of rows whose selections were told
};

}  // namespace kvasir::coordinator
