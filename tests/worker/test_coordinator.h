// The smallest coordinator that can drive an engine: starts requests, cuts prompts into chunks,
// names and seals blocks, reuses given prefixes, and collects tokens. It ignores fairness, time and
// memory. Call NextPlan, then Apply its reply; the next plan may be made before.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "gtest/gtest.h"

#include "kernels/paged/paged_kv.h"
#include "proto/kvasir/v1/worker.pb.h"

namespace kvasir::worker {

struct TestRequest {
  std::vector<uint32_t> prompt;
  int64_t max_tokens = 8;
  uint32_t policy = 0;
  v1::AttentionPolicy prefill, decode;  // numbers
  uint32_t tail_tokens = 64;
  v1::RowSampling sampling;
  // Positions of the prompt from here on are scored; none: no position is.
  std::optional<int64_t> score_begin = {};
  std::vector<uint64_t> cached_blocks;
  std::vector<uint32_t> generated = {};     // before it was preempted
  std::optional<uint32_t> last_token = {};  // ends the request where it is sampled
};

struct TestResult {
  std::vector<uint32_t> tokens;
  std::vector<v1::TokenLogprobs> logprobs;  // of tokens, when they were requested
  v1::PromptLogprobs prompt_logprobs;       // joined, when they were requested
  absl::Status status;
  v1::RowAccounting accounting;  // summed, except minimal masses
  std::vector<uint64_t> blocks;  // all blocks of the request, from position 0 on
};

class TestCoordinator {
 public:
  struct Options {
    uint64_t group_epoch = 1;
    int64_t num_slots = 16;
    int64_t chunk = 128;        // tokens of one prompt in one step
    int64_t max_tokens = 4096;  // of one step
    bool keep_blocks = false;   // full blocks stay when their request is done
  };

  explicit TestCoordinator(const Options& options) : options_(options) {}

  // Returns the index of its result.
  size_t Add(TestRequest request) {
    results_.emplace_back();
    running_.push_back({.request = std::move(request), .result = results_.size() - 1});
    return results_.size() - 1;
  }
  bool done() const { return running_.empty(); }
  int64_t rows_in_vain() const { return rows_in_vain_; }
  const TestResult& result(size_t i) const { return results_[i]; }

  v1::StepPlan NextPlan() {
    v1::StepPlan plan = std::move(pending_);  // seals, frees and drops of ended sequences
    pending_ = {};
    plan.set_group_epoch(options_.group_epoch);
    plan.set_step(++step_);
    int64_t budget = options_.max_tokens;
    for (Running& running : running_) {
      if (running.slot < 0) Start(running, plan);
      if (running.slot >= 0) AddRow(running, budget, plan);
    }
    return plan;
  }

  void Apply(const v1::StepPlan& plan, const v1::StepReply& reply) {
    ASSERT_EQ(reply.step(), plan.step());
    ASSERT_EQ(reply.results_size(), plan.rows_size());
    const std::vector<size_t> planned = std::move(planned_[plan.step()]);
    for (int i = 0; i < plan.rows_size(); ++i) {
      const auto running = std::find_if(running_.begin(), running_.end(), [&](const Running& r) {
        return r.result == planned[static_cast<size_t>(i)];
      });
      if (running == running_.end()) {  // ended by an earlier answer
        ++rows_in_vain_;
        continue;
      }
      ApplyRow(plan.rows(i), reply.results(i), *running);
      const TestResult& result = results_[running->result];
      const bool ended = std::ssize(result.tokens) >= running->request.max_tokens ||
                         (plan.rows(i).sample() && result.status.ok() &&
                          result.tokens.back() == running->request.last_token);
      if (ended || !result.status.ok()) {
        End(*running);
        running_.erase(running);
      }
    }
  }

  // Returns the hash with which it seals a block.
  static std::string HashOfBlock(uint64_t id) {
    std::string hash(32, 'h');
    std::memcpy(hash.data(), &id, sizeof(id));
    return hash;
  }

  // Drops the blocks that a result kept.
  void Drop(const TestResult& result) {
    for (const uint64_t block : result.blocks) pending_.add_drop_blocks(block);
  }

  using Counts = google::protobuf::RepeatedField<uint64_t>;
  static void AddCounts(const Counts& row, Counts& sum) {
    sum.Resize(std::max(row.size(), sum.size()), 0);
    for (int i = 0; i < row.size(); ++i) sum[i] += row[i];
  }

  static void AddMasses(const v1::MassSamples& row, v1::MassSamples& sum) {
    sum.set_samples(sum.samples() + row.samples());
    sum.set_sum(sum.sum() + row.sum());
    for (const auto& [permille, samples] : row.by_permille()) {
      (*sum.mutable_by_permille())[permille] += samples;
    }
  }

  static void AddContract(const v1::ContractReport& row, v1::ContractReport& sum) {
    sum.set_selections(sum.selections() + row.selections());
    sum.set_dense(sum.dense() + row.dense());
    sum.set_widened(sum.widened() + row.widened());
    sum.set_missed(sum.missed() + row.missed());
  }

  // Adds counts; minimal masses are left out.
  static void AddPhase(const v1::PhaseAccounting& row, v1::PhaseAccounting& sum) {
    sum.set_blocks_total(sum.blocks_total() + row.blocks_total());
    sum.set_skipped_selected_out(sum.skipped_selected_out() + row.skipped_selected_out());
    sum.set_skipped_window(sum.skipped_window() + row.skipped_window());
    sum.set_skipped_pruned(sum.skipped_pruned() + row.skipped_pruned());
    sum.set_skipped_terminated(sum.skipped_terminated() + row.skipped_terminated());
    sum.set_page_hits(sum.page_hits() + row.page_hits());
    sum.set_page_misses(sum.page_misses() + row.page_misses());
    AddMasses(row.measured_mass(), *sum.mutable_measured_mass());
  }

  static void AddAccounting(const v1::RowAccounting& row, v1::RowAccounting& sum) {
    AddPhase(row.prefill(), *sum.mutable_prefill());
    AddPhase(row.decode(), *sum.mutable_decode());
    AddCounts(row.stages_run(), *sum.mutable_stages_run());
    AddCounts(row.stages_reused(), *sum.mutable_stages_reused());
    AddMasses(row.estimated_mass(), *sum.mutable_estimated_mass());
    if (row.has_contract()) AddContract(row.contract(), *sum.mutable_contract());
    sum.set_attended_tokens(sum.attended_tokens() + row.attended_tokens());
    sum.set_attending_rows(sum.attending_rows() + row.attending_rows());
    sum.set_disk_page_waits(sum.disk_page_waits() + row.disk_page_waits());
    sum.set_disk_wait_s(sum.disk_wait_s() + row.disk_wait_s());
    sum.set_cached_device_tokens(sum.cached_device_tokens() + row.cached_device_tokens());
    sum.set_cached_host_tokens(sum.cached_host_tokens() + row.cached_host_tokens());
    sum.set_cached_disk_tokens(sum.cached_disk_tokens() + row.cached_disk_tokens());
  }

 private:
  static constexpr int64_t kPage = kernels::kPageTokens;

  struct Running {
    TestRequest request;
    size_t result = 0;
    int64_t slot = -1;
    int64_t length = 0;   // positions with KV after all plans made
    int64_t known = 0;    // tokens that the worker will then know
    int64_t sampled = 0;  // of these, sampled
    int64_t sealed = 0;   // blocks
  };

  void Start(Running& running, v1::StepPlan& plan) {
    for (int64_t slot = 0; slot < options_.num_slots && running.slot < 0; ++slot) {
      if (!slots_[slot]) running.slot = slot;
    }
    if (running.slot < 0) return;
    slots_[running.slot] = true;
    const TestRequest& request = running.request;
    v1::SequenceStart& start = *plan.add_starts();
    start.set_slot(static_cast<uint32_t>(running.slot));
    start.set_sequence_id(running.result);
    start.mutable_tokens()->Add(request.prompt.begin(), request.prompt.end());
    start.mutable_tokens()->Add(request.generated.begin(), request.generated.end());
    start.set_num_prompt_tokens(static_cast<uint32_t>(request.prompt.size()));
    start.mutable_cached_blocks()->Add(request.cached_blocks.begin(), request.cached_blocks.end());
    *start.mutable_sampling() = request.sampling;
    start.set_policy_index(request.policy);
    *start.mutable_prefill() = request.prefill;
    *start.mutable_decode() = request.decode;
    start.set_tail_tokens(request.tail_tokens);
    running.sealed = std::ssize(request.cached_blocks);
    running.length = running.sealed * kPage;
    running.known = start.tokens_size();
    results_[running.result].blocks = request.cached_blocks;
  }

  void AddRow(Running& running, int64_t& budget, v1::StepPlan& plan) {
    if (running.sampled == running.request.max_tokens) return;
    int64_t end = std::min(running.length + std::min(options_.chunk, budget), running.known);
    if (end < running.known) end = end / kPage * kPage;
    if (end <= running.length) return;
    budget -= end - running.length;
    v1::StepRow& row = *plan.add_rows();
    row.set_slot(static_cast<uint32_t>(running.slot));
    row.set_begin(static_cast<uint32_t>(running.length));
    row.set_num_tokens(static_cast<uint32_t>(end - running.length));
    row.set_sample(end == running.known);
    const int64_t last = std::ssize(running.request.prompt) - 1;
    if (const int64_t from = std::max(running.length, running.request.score_begin.value_or(last));
        from < std::min(end, last)) {
      row.set_score_begin(static_cast<uint32_t>(from));
      row.set_score_end(static_cast<uint32_t>(std::min(end, last)));
    }
    planned_[step_].push_back(running.result);
    running.length = end;
    if (row.sample()) {
      ++running.known;
      ++running.sampled;
    }
    std::vector<uint64_t>& blocks = results_[running.result].blocks;
    while (std::ssize(blocks) * kPage < end) {
      blocks.push_back(next_block_);
      row.add_new_blocks(next_block_++);
    }
  }

  void ApplyRow(const v1::StepRow& row, const v1::RowResult& row_result, Running& running) {
    TestResult& result = results_[running.result];
    ASSERT_EQ(row_result.slot(), row.slot());
    AddAccounting(row_result.accounting(), result.accounting);
    if (row_result.error_code() != 0) {
      result.status = absl::Status(static_cast<absl::StatusCode>(row_result.error_code()),
                                   row_result.error_message());
      return;
    }
    ASSERT_EQ(row_result.prompt_logprobs().logprobs_size(),
              static_cast<int>(row.score_end() - row.score_begin()));
    if (row_result.has_prompt_logprobs()) AddScores(row_result.prompt_logprobs(), result);
    ASSERT_EQ(row_result.has_token_id(), row.sample());
    if (row_result.has_token_id()) {
      result.tokens.push_back(row_result.token_id());
      ASSERT_EQ(row_result.has_logprobs(), running.request.sampling.has_logprobs());
      if (row_result.has_logprobs()) result.logprobs.push_back(row_result.logprobs());
    }
    const int64_t computed = row.begin() + row.num_tokens();
    for (; (running.sealed + 1) * kPage <= computed; ++running.sealed) {
      v1::BlockSeal& seal = *pending_.add_seals();
      seal.set_block_id(result.blocks[static_cast<size_t>(running.sealed)]);
      seal.set_prefix_hash(HashOfBlock(seal.block_id()));
    }
  }

  static void AddScores(const v1::PromptLogprobs& scores, TestResult& result) {
    v1::PromptLogprobs& all = result.prompt_logprobs;
    if (all.logprobs().empty()) {
      all = scores;
      return;
    }
    ASSERT_EQ(scores.index(), all.index() + static_cast<uint32_t>(all.logprobs_size()));
    ASSERT_EQ(scores.top_count(), all.top_count());
    all.mutable_logprobs()->MergeFrom(scores.logprobs());
    all.mutable_top_token_ids()->MergeFrom(scores.top_token_ids());
    all.mutable_top_logprobs()->MergeFrom(scores.top_logprobs());
  }

  void End(Running& running) {
    slots_[running.slot] = false;
    pending_.add_free_slots(static_cast<uint32_t>(running.slot));
    std::vector<uint64_t>& blocks = results_[running.result].blocks;
    blocks.resize(static_cast<size_t>(running.sealed));
    if (!options_.keep_blocks) Drop(results_[running.result]);
  }

  const Options options_;
  std::vector<Running> running_;
  std::vector<TestResult> results_;
  std::map<int64_t, bool> slots_;                    // taken
  std::map<uint64_t, std::vector<size_t>> planned_;  // results of the rows, by step
  int64_t rows_in_vain_ = 0;
  v1::StepPlan pending_;
  uint64_t step_ = 0;
  uint64_t next_block_ = 1;
};

// Returns the sum over both parts of a policy.
inline v1::PhaseAccounting BothPhases(const v1::RowAccounting& row) {
  v1::PhaseAccounting sum;
  TestCoordinator::AddPhase(row.prefill(), sum);
  TestCoordinator::AddPhase(row.decode(), sum);
  return sum;
}

}  // namespace kvasir::worker
