#include "coordinator/scheduler.h"

#include <algorithm>
#include <deque>
#include <map>
#include <random>
#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "proto/grpc_status.h"
#include "tests/support/iterations.h"
#include "tests/support/symbolic_worker.h"

namespace kvasir::coordinator {
namespace {

using kvasir::testing::Iterations;
using kvasir::testing::SymbolicWorker;
using kvasir::testing::SymbolicWorkerOptions;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr int64_t kVocab = 50;

SchedulerOptions Options(const SymbolicWorkerOptions& worker) {
  return {.group_epoch = 3,
          .device_blocks = worker.device_blocks,
          .disk_blocks = worker.disk_blocks,
          .vocab_size = worker.vocab_size,
          .weights_hash = std::string(32, 'w'),
          .kv_form = "rotated/float32",
          .max_num_seqs = worker.max_num_seqs,
          .max_num_batched_tokens = worker.max_num_batched_tokens,
          .max_queue_len = 1000,
          .enable_prefix_caching = true};
}

ResolvedPolicy DensePolicy() {
  ResolvedPolicy policy;
  policy.prefill.mutable_all();
  policy.decode.mutable_all();
  return policy;
}

ResolvedPolicy SparsePolicy(uint32_t tail_tokens) {
  ResolvedPolicy policy = DensePolicy();
  policy.index = 1;
  policy.decode.mutable_quest();
  policy.decode.set_window_tokens(64);
  policy.decode.set_token_budget(128);
  policy.tail_tokens = tail_tokens;
  return policy;
}

std::vector<int32_t> Prompt(int64_t length, int32_t seed = 1) {
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
  void RunUntilIdle() {
    for (;;) {
      DeliverTierReport();
      if (!Step()) return;
    }
  }
  // The rank's disk does all that it was asked, and the scheduler hears of it.
  void DeliverTierReport() {
    const v1::TierReport report = worker_->TakeTierReport(SymbolicWorker::Disk::kDone);
    ASSERT_EQ(scheduler_->OnTierReport(0, report, now_), absl::OkStatus());
    ASSERT_EQ(scheduler_->CheckIntegrity(), absl::OkStatus());
  }
  // The same disk, another process and another formation of the group.
  void Restart(const SymbolicWorkerOptions& options) { Restart(options, Options(options)); }
  void Restart(const SymbolicWorkerOptions& worker, const SchedulerOptions& options) {
    const std::unique_ptr<SymbolicWorker> before = std::move(worker_);
    Make(worker, options);
    const v1::TierReport stored = worker_->TakeOverDisk(*before);
    ASSERT_EQ(scheduler_->OnTierReport(0, stored, now_), absl::OkStatus());
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
      } else {
        auto& finish = std::get<FinishEvent>(event);
        EXPECT_FALSE(finished_.contains(finish.id));
        finished_.emplace(finish.id, finish);
      }
    }
  }
  std::vector<int32_t> Expected(const SequenceSpec& spec) const {
    return SymbolicWorker::ExpectedTokens(spec.prompt, spec.max_tokens, spec.sampling, kVocab);
  }

  TimePoint now_ = TimePoint() + std::chrono::hours(1);
  int64_t next_id_ = 0;
  std::unique_ptr<SymbolicWorker> worker_;
  std::unique_ptr<Scheduler> scheduler_;
  v1::StepPlan plan_;
  std::map<SequenceId, std::vector<int32_t>> tokens_;
  std::map<SequenceId, std::vector<ProgressEvent>> progress_;
  std::map<SequenceId, FinishEvent> finished_;
};

TEST_F(SchedulerTest, HasNothingToDoWithoutRequests) {
  Make({});
  EXPECT_FALSE(Step());
}

TEST_F(SchedulerTest, AnswersWithMaxTokensAndThenLetsEverythingGo) {
  Make({});
  SequenceSpec spec = Spec(Prompt(100), 5);
  const std::vector<int32_t> expected = Expected(spec);
  const SequenceId id = Add(std::move(spec));
  RunUntilIdle();
  EXPECT_EQ(tokens_[id], expected);
  ASSERT_TRUE(finished_.contains(id));
  const FinishEvent& finish = finished_.at(id);
  EXPECT_EQ(finish.status, absl::OkStatus());
  EXPECT_EQ(finish.summary.reason(), v1::FINISH_REASON_LENGTH);
  EXPECT_EQ(finish.summary.usage().prompt_tokens(), 100u);
  EXPECT_EQ(finish.summary.usage().completion_tokens(), 5u);
  EXPECT_EQ(worker_->num_sequences(), 0);
  EXPECT_EQ(worker_->num_blocks(), 1);  // the prompt's full block stays cached
  EXPECT_EQ(scheduler_->stats().index.held_blocks, 0);
}

TEST_F(SchedulerTest, ChunksEndAtMultiplesOf64AndFillTheStepBehindDecodes) {
  Make({.max_num_batched_tokens = 256});
  Add(Spec(Prompt(10), 100));
  ASSERT_TRUE(Step());
  ASSERT_TRUE(Step());  // decodes from now on
  Add(Spec(Prompt(300, 2), 1));
  ASSERT_TRUE(Step());
  ASSERT_THAT(plan_.rows(), SizeIs(2));
  EXPECT_EQ(plan_.rows(0).num_tokens(), 1u);
  EXPECT_EQ(plan_.rows(1).num_tokens(), 192u);  // 255 left, whole blocks only
  ASSERT_TRUE(Step());
  ASSERT_THAT(plan_.rows(), SizeIs(2));
  EXPECT_EQ(plan_.rows(1).begin(), 192u);
  EXPECT_EQ(plan_.rows(1).num_tokens(), 108u);  // to the prompt's end
  EXPECT_TRUE(plan_.rows(1).sample());
}

TEST_F(SchedulerTest, SeveralPromptsShareAStepInOrderOfArrival) {
  Make({.max_num_batched_tokens = 256});
  const SequenceId first = Add(Spec(Prompt(100, 1), 1));
  const SequenceId second = Add(Spec(Prompt(300, 2), 1));
  Add(Spec(Prompt(100, 3), 1));
  ASSERT_TRUE(Step());
  ASSERT_THAT(plan_.starts(), SizeIs(2));
  EXPECT_EQ(plan_.starts(0).sequence_id(), static_cast<uint64_t>(first.value));
  EXPECT_EQ(plan_.starts(1).sequence_id(), static_cast<uint64_t>(second.value));
  EXPECT_EQ(plan_.rows(1).num_tokens(), 128u);
}

// They waited until it was read: 8 s at 2,000 tokens on a CPU.
TEST_F(SchedulerTest, ShortPromptsPassALongOne) {
  Make({.max_num_batched_tokens = 256});
  const SequenceId longest = Add(Spec(Prompt(1024), 1));
  ASSERT_TRUE(Step());
  const SequenceId second_long = Add(Spec(Prompt(900, 2), 1));
  const SequenceId first = Add(Spec(Prompt(30, 3), 1));
  const SequenceId second = Add(Spec(Prompt(64, 4), 1));
  const SequenceId third = Add(Spec(Prompt(100, 5), 1));
  ASSERT_TRUE(Step());
  EXPECT_TRUE(finished_.contains(first));
  EXPECT_TRUE(finished_.contains(second));
  ASSERT_TRUE(Step());
  EXPECT_TRUE(finished_.contains(third));
  EXPECT_FALSE(finished_.contains(longest));
  EXPECT_FALSE(progress_.contains(second_long));  // long prompts are read one after another
  RunUntilIdle();
  EXPECT_THAT(finished_, SizeIs(5));
}

TEST_F(SchedulerTest, TheOldestPromptKeepsHalfOfEveryStep) {
  Make({.max_num_batched_tokens = 256});
  const SequenceId longest = Add(Spec(Prompt(1024), 1));
  ASSERT_TRUE(Step());
  int steps = 1;
  for (; !finished_.contains(longest); ++steps) {
    for (int i = 0; i < 5; ++i) Add(Spec(Prompt(50, 10 * steps + i), 1));
    ASSERT_TRUE(Step());
    ASSERT_LT(steps, 10);
  }
  EXPECT_EQ(steps, 7);  // 256 at first, then 128 a step: twice as long as alone
  RunUntilIdle();
}

TEST_F(SchedulerTest, AQuestionOnADocumentThatIsCachedPassesALongPrompt) {
  Make({.max_num_batched_tokens = 256});
  std::vector<int32_t> document = Prompt(640);
  Add(Spec(document, 1));
  RunUntilIdle();
  const SequenceId longest = Add(Spec(Prompt(1024, 2), 1));
  ASSERT_TRUE(Step());
  document.insert(document.end(), {1, 2, 3});
  const SequenceId question = Add(Spec(document, 1));
  ASSERT_TRUE(Step());
  EXPECT_TRUE(finished_.contains(question));
  EXPECT_FALSE(finished_.contains(longest));
  RunUntilIdle();
}

TEST_F(SchedulerTest, PassingLeavesTheHeadOfTheQueueItsSlotAndItsBlocks) {
  Make({.host_blocks = 24, .max_num_seqs = 3, .max_num_batched_tokens = 256});
  const SequenceId longest = Add(Spec(Prompt(640), 1));
  ASSERT_TRUE(Step());
  Add(Spec(Prompt(640, 2), 1));
  const SequenceId third = Add(Spec(Prompt(150, 3), 1));  // the head would not fit beside it
  ASSERT_TRUE(Step());
  EXPECT_FALSE(finished_.contains(third));
  EXPECT_FALSE(finished_.contains(longest));
  RunUntilIdle();
  EXPECT_THAT(finished_, SizeIs(3));
}

TEST_F(SchedulerTest, AStopTokenEndsTheAnswer) {
  Make({});
  SequenceSpec spec = Spec(Prompt(20), 500);
  for (uint32_t stop : {3u, 8u, 11u}) spec.sampling.add_stop_token_ids(stop);
  const std::vector<int32_t> expected = Expected(spec);
  ASSERT_LT(expected.size(), 500u);
  const SequenceId id = Add(std::move(spec));
  RunUntilIdle();
  EXPECT_EQ(tokens_[id], expected);
  EXPECT_EQ(finished_.at(id).summary.reason(), v1::FINISH_REASON_STOP);
  EXPECT_EQ(finished_.at(id).summary.matched_token_id(), static_cast<uint32_t>(expected.back()));
}

TEST_F(SchedulerTest, NoStopTokenEndsTheAnswerBeforeMinTokens) {
  Make({});
  SequenceSpec spec = Spec(Prompt(20), 60);
  for (uint32_t stop = 0; stop < 25; ++stop) spec.sampling.add_stop_token_ids(stop);
  spec.sampling.set_min_tokens(40);
  const std::vector<int32_t> expected = Expected(spec);
  ASSERT_GT(expected.size(), 40u);
  const SequenceId id = Add(std::move(spec));
  RunUntilIdle();
  EXPECT_EQ(tokens_[id], expected);
}

TEST_F(SchedulerTest, TheSecondRequestFindsThePromptOfTheFirst) {
  Make({});
  const std::vector<int32_t> prompt = Prompt(300);
  Add(Spec(prompt, 1));  // answered in the step that fills its last block
  RunUntilIdle();
  const SequenceId second = Add(Spec(prompt, 3));
  ASSERT_TRUE(Step());
  EXPECT_THAT(plan_.starts(0).cached_blocks(), SizeIs(4));
  EXPECT_EQ(plan_.rows(0).begin(), 256u);
  RunUntilIdle();
  EXPECT_EQ(progress_[second].front().cached_tokens, 256);
  EXPECT_EQ(finished_.at(second).summary.usage().cached_tokens().device(), 256u);
  EXPECT_EQ(scheduler_->stats().prefix_queries, 600);
  EXPECT_EQ(scheduler_->stats().prefix_hits, 256);
}

TEST_F(SchedulerTest, RequestsThatArriveTogetherShareTheirPrefixOnceItIsRead) {
  Make({.max_num_batched_tokens = 128});
  const std::vector<int32_t> document = Prompt(640);
  for (int i = 0; i < 4; ++i) {
    std::vector<int32_t> prompt = document;
    prompt.insert(prompt.end(), static_cast<size_t>(10), i);
    Add(Spec(prompt, 2));
  }
  RunUntilIdle();
  EXPECT_EQ(scheduler_->stats().prefix_hits, 3 * 640);
}

TEST_F(SchedulerTest, TenantsAndPrefillPoliciesDoNotShare) {
  Make({});
  const std::vector<int32_t> prompt = Prompt(300);
  Add(Spec(prompt, 1));
  RunUntilIdle();
  SequenceSpec other_tenant = Spec(prompt, 1);
  other_tenant.tenant = "other";
  Add(std::move(other_tenant));
  RunUntilIdle();
  SequenceSpec other_prefill = Spec(prompt, 1);
  other_prefill.policy.prefill.mutable_streaming();
  other_prefill.policy.prefill.set_window_tokens(64);
  Add(std::move(other_prefill));
  RunUntilIdle();
  EXPECT_EQ(scheduler_->stats().prefix_hits, 0);
}

TEST_F(SchedulerTest, NothingIsSharedWithPrefixCachingOff) {
  SchedulerOptions options = Options({});
  options.enable_prefix_caching = false;
  Make({}, options);
  for (int i = 0; i < 2; ++i) {
    Add(Spec(Prompt(300), 1));
    RunUntilIdle();
  }
  EXPECT_EQ(scheduler_->stats().prefix_hits, 0);
  EXPECT_EQ(worker_->num_blocks(), 0);
}

TEST_F(SchedulerTest, BlocksThatASparseTailTouchesAreNeitherSharedNorReplaced) {
  Make({});
  const std::vector<int32_t> prompt = Prompt(320);
  SequenceSpec sparse = Spec(prompt, 1);
  sparse.policy = SparsePolicy(64);
  Add(std::move(sparse));
  RunUntilIdle();
  EXPECT_EQ(worker_->num_blocks(), 4);  // [0, 256) of 320; the tail's block is gone
  Add(Spec(prompt, 1));                 // dense: caches [256, 320) as well
  RunUntilIdle();
  EXPECT_EQ(worker_->num_blocks(), 5);
  std::vector<int32_t> longer = prompt;
  longer.push_back(1);
  SequenceSpec again = Spec(longer, 1);  // its tail begins at 257
  again.policy = SparsePolicy(64);
  Add(std::move(again));
  ASSERT_TRUE(Step());
  EXPECT_THAT(plan_.starts(0).cached_blocks(), SizeIs(4));
}

TEST_F(SchedulerTest, AnswersOfADenseRequestAreFoundByTheNextTurn) {
  Make({});
  std::vector<int32_t> conversation = Prompt(100);
  const SequenceId first = Add(Spec(conversation, 100));
  RunUntilIdle();
  conversation.insert(conversation.end(), tokens_[first].begin(), tokens_[first].end());
  conversation.push_back(1);
  Add(Spec(conversation, 1));
  ASSERT_TRUE(Step());
  EXPECT_THAT(plan_.starts(0).cached_blocks(), SizeIs(3));
}

TEST_F(SchedulerTest, AnswersThatFollowASparsePrefillAreNotShared) {
  Make({});
  SequenceSpec spec = Spec(Prompt(64), 200);
  spec.policy.prefill.mutable_quest();
  spec.policy.prefill.set_window_tokens(64);
  spec.policy.prefill.set_token_budget(64);
  const ResolvedPolicy policy = spec.policy;
  std::vector<int32_t> conversation = spec.prompt;
  const SequenceId first = Add(std::move(spec));
  RunUntilIdle();
  conversation.insert(conversation.end(), tokens_[first].begin(), tokens_[first].end());
  SequenceSpec next = Spec(conversation, 1);
  next.policy = policy;
  Add(std::move(next));
  ASSERT_TRUE(Step());
  EXPECT_THAT(plan_.starts(0).cached_blocks(), SizeIs(1));
}

TEST_F(SchedulerTest, ARequestThatCanNeverFitIsRefusedWithNumbers) {
  Make({.host_blocks = 4});
  EXPECT_EQ(scheduler_->Add(Spec(Prompt(200), 57)), absl::OkStatus());  // 256 tokens need KV
  const absl::Status status = scheduler_->Add(Spec(Prompt(200), 58));
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("need 5 blocks"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("holds 4"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("--kv-host-size-gb"));
}

TEST_F(SchedulerTest, WaitsUntilThereAreBlocksForThePromptAndOneMore) {
  Make({.host_blocks = 6});
  Add(Spec(Prompt(100, 1), 1));  // 2 blocks each
  Add(Spec(Prompt(100, 2), 1));
  const SequenceId third = Add(Spec(Prompt(100, 3), 1));
  ASSERT_TRUE(Step());
  EXPECT_EQ(scheduler_->stats().running, 0);  // both have ended
  EXPECT_EQ(scheduler_->stats().waiting, 1);
  RunUntilIdle();
  EXPECT_THAT(tokens_[third], SizeIs(1));
  EXPECT_EQ(scheduler_->stats().preempted_recompute, 0);
}

// --- preemption

class SchedulerPreemptionTest : public SchedulerTest {
 protected:
  // Two answers that do not fit together: 4 blocks each, of 6 (or `host_blocks`).
  void AddTwo(const ResolvedPolicy& policy = DensePolicy()) {
    for (int32_t i : {1, 2}) {
      SequenceSpec spec = Spec(Prompt(100, i), 150);
      spec.policy = policy;
      expected_.push_back(Expected(spec));
      ids_.push_back(Add(std::move(spec)));
    }
  }
  void ExpectAnswers() {
    for (size_t i = 0; i < ids_.size(); ++i) {
      EXPECT_EQ(tokens_[ids_[i]], expected_[i]) << i;  // Collect checks the indices
      EXPECT_EQ(finished_.at(ids_[i]).status, absl::OkStatus());
    }
  }

  std::vector<SequenceId> ids_;
  std::vector<std::vector<int32_t>> expected_;
};

TEST_F(SchedulerPreemptionTest, TheYoungestGivesWayAndIsAnsweredTheSame) {
  Make({.host_blocks = 6});
  AddTwo();
  while (scheduler_->stats().preempted_recompute == 0) ASSERT_TRUE(Step());
  EXPECT_EQ(scheduler_->stats().running, 1);
  EXPECT_EQ(scheduler_->stats().waiting, 1);
  EXPECT_THAT(plan_.free_slots(), SizeIs(1));
  EXPECT_THAT(plan_.rows(), SizeIs(1));
  while (!finished_.contains(ids_[0])) ASSERT_TRUE(Step());
  EXPECT_FALSE(finished_.contains(ids_[1]));
  RunUntilIdle();
  ExpectAnswers();
  EXPECT_EQ(scheduler_->stats().preempted_swap, 0);
  const v1::Usage& usage = finished_.at(ids_[1]).summary.usage();
  EXPECT_EQ(usage.prompt_tokens(), 100u);
  EXPECT_EQ(usage.completion_tokens(), 150u);
  EXPECT_EQ(usage.cached_tokens().device(), 0u);
  EXPECT_EQ(scheduler_->stats().prefix_queries, 200);
}

TEST_F(SchedulerPreemptionTest, WhatWasGeneratedIsReadAgainInOneRowAndNotSampled) {
  SchedulerOptions options = Options({.host_blocks = 6});
  options.enable_prefix_caching = false;
  Make({.host_blocks = 6}, options);
  AddTwo();
  while (!finished_.contains(ids_[0])) ASSERT_TRUE(Step());
  const size_t had = tokens_[ids_[1]].size();
  ASSERT_GT(had, 64u);
  while (plan_.starts().empty()) ASSERT_TRUE(Step());
  EXPECT_EQ(plan_.starts(0).num_prompt_tokens(), 100u);
  EXPECT_THAT(plan_.starts(0).tokens(), SizeIs(100 + had));
  EXPECT_EQ(plan_.rows(0).num_tokens(), 100 + had);
  EXPECT_EQ(tokens_[ids_[1]].size(), had + 1);
  EXPECT_EQ(scheduler_->stats().resumed_recompute, 1);
  RunUntilIdle();
  ExpectAnswers();
}

TEST_F(SchedulerPreemptionTest, BlocksThatAreLeftAreFoundAgainInMemory) {
  Make({.host_blocks = 7});
  AddTwo(SparsePolicy(64));  // so that the blocks of the answer are its own
  RunUntilIdle();
  ExpectAnswers();
  EXPECT_GT(scheduler_->stats().preempted_recompute, 0);
  EXPECT_GT(scheduler_->stats().resumed_host, 0);
}

TEST_F(SchedulerPreemptionTest, BlocksComeBackFromDisk) {
  Make({.host_blocks = 6, .disk_blocks = 100});
  AddTwo(SparsePolicy(64));
  RunUntilIdle();
  ExpectAnswers();
  EXPECT_GT(scheduler_->stats().preempted_swap, 0);
  EXPECT_EQ(scheduler_->stats().preempted_recompute, 0);
  EXPECT_GT(scheduler_->stats().resumed_disk, 0);
  EXPECT_GT(worker_->reads(), 0);
}

TEST_F(SchedulerPreemptionTest, OwnBlocksAreNotFoundByOthers) {
  Make({.host_blocks = 7});
  AddTwo(SparsePolicy(64));
  while (scheduler_->stats().preempted_recompute == 0) ASSERT_TRUE(Step());
  std::vector<int32_t> turn = Prompt(100, 2);
  turn.insert(turn.end(), tokens_[ids_[1]].begin(), tokens_[ids_[1]].end());
  turn.push_back(1);
  SequenceSpec spec = Spec(turn, 1);  // dense: it would read the answer block by block
  const std::vector<int32_t> expected = Expected(spec);
  const SequenceId id = Add(std::move(spec));
  RunUntilIdle();  // the rank refuses blocks that are not this prefix
  EXPECT_EQ(tokens_[id], expected);
  ExpectAnswers();
}

// Equal tokens and policies, but another position from which on tokens were read one by one.
TEST_F(SchedulerPreemptionTest, OwnBlocksAreOnlyForPromptsOfTheSameLength) {
  Make({.host_blocks = 10, .disk_blocks = 100});
  const SequenceId oldest = Add(Spec(Prompt(100, 1), 500));
  SequenceSpec spec = Spec(Prompt(100, 2), 400);
  spec.policy = SparsePolicy(64);
  const SequenceId first = Add(spec);
  while (scheduler_->stats().preempted_swap == 0) ASSERT_TRUE(Step());
  DeliverTierReport();
  ASSERT_TRUE(scheduler_->Cancel(first, absl::CancelledError(""), now_).has_value());
  spec.id = SequenceId(next_id_++);
  spec.prompt.insert(spec.prompt.end(), tokens_[first].begin(), tokens_[first].begin() + 20);
  const std::vector<int32_t> expected = Expected(spec);
  const SequenceId second = Add(spec);
  while (scheduler_->stats().preempted_swap == 1) ASSERT_TRUE(Step());
  EXPECT_FALSE(finished_.contains(oldest));
  RunUntilIdle();  // the rank refuses blocks that are not this prefix
  EXPECT_EQ(tokens_[second], expected);
  EXPECT_GT(scheduler_->stats().resumed_disk, 0);
}

TEST_F(SchedulerPreemptionTest, WithAWindowBelowAPageTheAnswerIsReadOneByOne) {
  SchedulerOptions options = Options({.host_blocks = 6});
  options.enable_prefix_caching = false;
  Make({.host_blocks = 6}, options);
  ResolvedPolicy policy = SparsePolicy(0);
  policy.decode.set_window_tokens(32);
  AddTwo(policy);
  while (!finished_.contains(ids_[0])) ASSERT_TRUE(Step());
  while (plan_.starts().empty()) ASSERT_TRUE(Step());
  ASSERT_GT(plan_.starts(0).tokens_size(), 100);
  EXPECT_LE(plan_.rows(0).begin() + plan_.rows(0).num_tokens(), 100u);
  ASSERT_TRUE(Step());
  EXPECT_EQ(plan_.rows(0).num_tokens(), 1u);
  EXPECT_FALSE(plan_.rows(0).sample());
  RunUntilIdle();
  ExpectAnswers();
}

TEST_F(SchedulerPreemptionTest, APromptThatIsBeingReadGivesWayAndItsProgressNeverFalls) {
  SchedulerOptions options = Options({.host_blocks = 48, .max_num_batched_tokens = 128});
  options.enable_prefix_caching = false;  // so that it begins anew
  Make({.host_blocks = 48, .max_num_batched_tokens = 128}, options);
  for (int32_t i = 0; i < 3; ++i) Add(Spec(Prompt(60 + 20 * i, i + 1), 300));
  for (int i = 0; i < 30; ++i) ASSERT_TRUE(Step());
  const SequenceId long_one = Add(Spec(Prompt(2560, 9), 3));  // 40 blocks in as many steps
  while (scheduler_->stats().preempted_recompute == 0) ASSERT_TRUE(Step());
  EXPECT_GT(progress_[long_one].back().processed_tokens, 1000);
  EXPECT_THAT(tokens_[long_one], IsEmpty());
  RunUntilIdle();
  EXPECT_THAT(tokens_[long_one], SizeIs(3));
  std::vector<int64_t> processed;
  for (const ProgressEvent& event : progress_[long_one])
    processed.push_back(event.processed_tokens);
  EXPECT_TRUE(std::is_sorted(processed.begin(), processed.end()));
  EXPECT_EQ(processed.back(), 2560);
}

TEST_F(SchedulerPreemptionTest, ARestoringRequestGivesWay) {
  const SymbolicWorkerOptions options = {.host_blocks = 7, .disk_blocks = 100};
  Make(options);
  Add(Spec(Prompt(200, 1), 1));
  RunUntilIdle();
  SchedulerOptions patient = Options(options);
  patient.restore_patience = absl::Hours(1);
  Restart(options, patient);
  const SequenceId runs = Add(Spec(Prompt(60, 2), 300));
  ASSERT_TRUE(Step());
  const SequenceId restores = Add(Spec(Prompt(200, 1), 2));
  ASSERT_TRUE(Step());
  ASSERT_EQ(scheduler_->stats().restoring, 1);
  while (scheduler_->stats().restoring == 1) ASSERT_TRUE(Step());  // the disk is silent
  EXPECT_FALSE(finished_.contains(runs));
  EXPECT_EQ(scheduler_->stats().waiting, 1);
  RunUntilIdle();
  EXPECT_THAT(tokens_[runs], SizeIs(300));
  EXPECT_THAT(tokens_[restores], SizeIs(2));
}

TEST_F(SchedulerPreemptionTest, CancellingAPreemptedRequestLeavesNothing) {
  Make({.host_blocks = 6});
  AddTwo();
  while (scheduler_->stats().preempted_recompute == 0) ASSERT_TRUE(Step());
  ASSERT_TRUE(scheduler_->Cancel(ids_[1], absl::CancelledError(""), now_).has_value());
  RunUntilIdle();
  EXPECT_EQ(tokens_[ids_[0]], expected_[0]);
  EXPECT_EQ(worker_->num_sequences(), 0);
  EXPECT_EQ(scheduler_->stats().index.held_blocks, 0);
}

TEST_F(SchedulerTest, TheQueueIsBounded) {
  SchedulerOptions options = Options({.max_num_seqs = 2});
  options.max_queue_len = 1;
  Make({.max_num_seqs = 2}, options);
  for (int i = 0; i < 3; ++i) Add(Spec(Prompt(10, i + 1), 4));  // two can start, one waits
  EXPECT_EQ(scheduler_->Add(Spec(Prompt(10), 4)).code(), absl::StatusCode::kResourceExhausted);
  ASSERT_TRUE(Step());
  EXPECT_EQ(scheduler_->Add(Spec(Prompt(10), 4)).code(), absl::StatusCode::kResourceExhausted);
  RunUntilIdle();
  EXPECT_THAT(finished_, SizeIs(3));
}

TEST_F(SchedulerTest, BesideDecodingSequencesChunksShrinkWithTheContextBehindThem) {
  constexpr int64_t kPrompt = 312 * 64;
  const SymbolicWorkerOptions worker = {.device_blocks = 1000, .host_blocks = 1000};
  SchedulerOptions options = Options(worker);
  options.attention_parity_tokens = 1000;
  Make(worker, options);
  Add(Spec(Prompt(kPrompt, 1), 2));
  for (int64_t read = 0; read < kPrompt; read += 512) {  // alone: whole chunks to the end
    ASSERT_TRUE(Step());
    EXPECT_EQ(plan_.rows(0).num_tokens(), std::min<int64_t>(512, kPrompt - read));
  }
  RunUntilIdle();

  Add(Spec(Prompt(100, 2), 2000));
  ASSERT_TRUE(Step());
  Add(Spec(Prompt(kPrompt, 3), 2));
  int64_t before = 512, begin = 0;
  while (begin + before < kPrompt) {
    ASSERT_TRUE(Step());
    ASSERT_EQ(plan_.rows_size(), 2);
    ASSERT_EQ(plan_.rows(0).num_tokens(), 1u) << "the stream waits";
    const int64_t tokens = plan_.rows(1).num_tokens();
    begin = plan_.rows(1).begin();
    EXPECT_LE(tokens, before);
    EXPECT_TRUE(tokens <= 64 || tokens * (1000 + begin + 64) <= 512 * (1000 + 4096)) << begin;
    EXPECT_TRUE(begin > 0 || tokens == 448);  // 511 in whole blocks
    before = tokens;
  }
  EXPECT_LE(before, 64);
  RunUntilIdle();
  EXPECT_THAT(finished_, SizeIs(3));
}

TEST_F(SchedulerTest, WhatASparsePolicyAttendsToIsWhatAChunkCosts) {
  const SymbolicWorkerOptions worker = {.device_blocks = 1000, .host_blocks = 1000};
  Make(worker);
  Add(Spec(Prompt(100, 2), 2000));
  ASSERT_TRUE(Step());
  SequenceSpec sparse = Spec(Prompt(20000, 3), 2);
  sparse.policy.prefill.clear_all();
  sparse.policy.prefill.mutable_streaming();
  sparse.policy.prefill.set_window_tokens(512);
  Add(std::move(sparse));
  for (int64_t read = 0; read < 20000; read += 448) {
    ASSERT_TRUE(Step());
    EXPECT_EQ(plan_.rows(1).num_tokens(), std::min<int64_t>(448, 20000 - read));
  }
  RunUntilIdle();
}

TEST_F(SchedulerTest, TheTokensOfTheQueueAreBoundedButOneMayWaitWhateverItsLength) {
  SchedulerOptions options = Options({.max_num_seqs = 1});
  options.max_queued_tokens = 500;
  Make({.max_num_seqs = 1}, options);
  Add(Spec(Prompt(100, 1), 4));
  ASSERT_TRUE(Step());
  Add(Spec(Prompt(600, 2), 4));  // alone in the queue
  EXPECT_EQ(scheduler_->stats().waiting_tokens, 600);
  const absl::Status status = scheduler_->Add(Spec(Prompt(1), 4));
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("600 prompt tokens wait"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("--max-queued-tokens"));
  RunUntilIdle();
  EXPECT_EQ(scheduler_->stats().waiting_tokens, 0);
  Add(Spec(Prompt(100, 3), 4));
  ASSERT_TRUE(Step());
  Add(Spec(Prompt(200, 4), 4));
  Add(Spec(Prompt(300, 5), 4));  // exactly 500
  EXPECT_EQ(scheduler_->Add(Spec(Prompt(1), 4)).code(), absl::StatusCode::kResourceExhausted);
  RunUntilIdle();
  EXPECT_THAT(finished_, SizeIs(5));
}

TEST_F(SchedulerTest, OnlyWhatTimeMendsTellsWhenToTryAgain) {
  SchedulerOptions options = Options({.host_blocks = 10, .max_num_seqs = 1});
  options.max_queue_len = 0;
  Make({.host_blocks = 10, .max_num_seqs = 1}, options);
  EXPECT_EQ(proto::RetryDelay(scheduler_->Add(Spec(Prompt(700), 4))), std::nullopt);
  Add(Spec(Prompt(100), 4));
  EXPECT_EQ(proto::RetryDelay(scheduler_->Add(Spec(Prompt(100), 4))), absl::Seconds(1));
}

TEST_F(SchedulerTest, ASmallDeviceTierOnlySlowsThingsDown) {
  for (int64_t device_blocks : {1, 2, 3, 9}) {
    SCOPED_TRACE(device_blocks);
    Make({.device_blocks = device_blocks});
    finished_.clear();
    for (int i = 0; i < 5; ++i) Add(Spec(Prompt(300, i + 1), 100));
    RunUntilIdle();
    EXPECT_THAT(finished_, SizeIs(5));
  }
}

TEST_F(SchedulerTest, ManyDecodesLeaveRoomForAPrompt) {
  Make({.max_num_seqs = 16, .max_num_batched_tokens = 64});
  for (int i = 0; i < 16; ++i) Add(Spec(Prompt(100, i + 1), 1000000 / 500));
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(Step());
  EXPECT_EQ(scheduler_->stats().running, 1);  // 64 tokens a step: one prompt at a time
}

TEST_F(SchedulerTest, CancellingFreesEverythingAndKeepsWhatWasRead) {
  Make({.max_num_batched_tokens = 128});
  const SequenceId running = Add(Spec(Prompt(1000), 10));
  const SequenceId waiting = Add(Spec(Prompt(1000, 2), 10));
  ASSERT_TRUE(Step());
  ASSERT_TRUE(Step());
  for (SequenceId id : {running, waiting}) {
    std::optional<FinishEvent> finish = scheduler_->Cancel(id, absl::CancelledError("bye"), now_);
    ASSERT_TRUE(finish.has_value());
    EXPECT_EQ(finish->status, absl::CancelledError("bye"));
    EXPECT_FALSE(scheduler_->Cancel(id, absl::CancelledError("again"), now_).has_value());
  }
  ASSERT_TRUE(Step());  // tells the ranks
  EXPECT_THAT(plan_.rows(), IsEmpty());
  EXPECT_FALSE(Step());
  EXPECT_EQ(worker_->num_sequences(), 0);
  EXPECT_EQ(worker_->num_blocks(), 4);
  EXPECT_EQ(scheduler_->stats().index.held_blocks, 0);
}

TEST_F(SchedulerTest, CancellingWhileAStepRunsIsSafe) {
  Make({});
  const SequenceId id = Add(Spec(Prompt(100), 10));
  Scheduler::Planned planned = scheduler_->NextPlan(now_);
  EXPECT_TRUE(scheduler_->Cancel(id, absl::CancelledError(""), now_).has_value());
  absl::StatusOr<v1::StepReply> reply = worker_->Execute(*planned.plan);
  ASSERT_TRUE(reply.ok());
  EXPECT_THAT(*scheduler_->OnReply(*reply, now_), IsEmpty());
  RunUntilIdle();
  EXPECT_EQ(worker_->num_sequences(), 0);
  EXPECT_EQ(worker_->num_blocks(), 0);
}

TEST_F(SchedulerTest, AStopStringEndsTheSequence) {
  Make({});
  const SequenceId id = Add(Spec(Prompt(100), 10));
  ASSERT_TRUE(Step());
  std::optional<FinishEvent> finish = scheduler_->StopEarly(id, now_);
  ASSERT_TRUE(finish.has_value());
  EXPECT_EQ(finish->status, absl::OkStatus());
  EXPECT_EQ(finish->summary.reason(), v1::FINISH_REASON_STOP);
  EXPECT_EQ(finish->summary.usage().completion_tokens(), 1u);
  RunUntilIdle();
  EXPECT_EQ(worker_->num_sequences(), 0);
}

TEST_F(SchedulerTest, PlansAgainWithoutTheBlocksThatARankLost) {
  Make({});
  const std::vector<int32_t> prompt = Prompt(300);
  Add(Spec(prompt, 1));
  RunUntilIdle();
  ASSERT_TRUE(worker_->LoseOneBlock(2));
  const SequenceId id = Add(Spec(prompt, 4));
  ASSERT_TRUE(Step());  // answered with the missing block
  EXPECT_THAT(tokens_[id], IsEmpty());
  RunUntilIdle();
  EXPECT_THAT(tokens_[id], SizeIs(4));
  EXPECT_EQ(finished_.at(id).status, absl::OkStatus());
  EXPECT_EQ(finished_.at(id).summary.usage().cached_tokens().device(), 128u);
}

TEST_F(SchedulerTest, ARequestCancelledWhileItsStartIsRefusedLeavesNothing) {
  Make({});
  const std::vector<int32_t> prompt = Prompt(300);
  Add(Spec(prompt, 1));
  RunUntilIdle();
  ASSERT_TRUE(worker_->LoseOneBlock(0));
  const SequenceId id = Add(Spec(prompt, 4));
  Scheduler::Planned planned = scheduler_->NextPlan(now_);
  ASSERT_TRUE(scheduler_->Cancel(id, absl::CancelledError(""), now_).has_value());
  absl::StatusOr<v1::StepReply> reply = worker_->Execute(*planned.plan);
  ASSERT_TRUE(reply.ok());
  ASSERT_THAT(reply->missing_blocks(), SizeIs(1));
  EXPECT_TRUE(scheduler_->OnReply(*reply, now_).ok());
  EXPECT_EQ(scheduler_->CheckIntegrity(), absl::OkStatus());
  RunUntilIdle();
  EXPECT_EQ(worker_->num_blocks(), 0);  // what continues a lost block is dropped with it
}

TEST_F(SchedulerTest, ARunningSequenceThatLosesABlockEndsWithDataLoss) {
  Make({});
  const SequenceId id = Add(Spec(Prompt(100), 10));
  ASSERT_TRUE(Step());
  Scheduler::Planned planned = scheduler_->NextPlan(now_);
  v1::StepReply reply;
  reply.set_group_epoch(3);
  reply.set_step(planned.plan->step());
  reply.add_missing_blocks(planned.plan->seals(0).block_id());
  absl::StatusOr<std::vector<Event>> events = scheduler_->OnReply(reply, now_);
  ASSERT_TRUE(events.ok());
  Collect(*std::move(events));
  EXPECT_EQ(finished_.at(id).status.code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(scheduler_->CheckIntegrity(), absl::OkStatus());
}

TEST_F(SchedulerTest, ARowThatFailsEndsItsRequestAlone) {
  Make({});
  const SequenceId bad = Add(Spec(Prompt(100, 1), 10));
  const SequenceId good = Add(Spec(Prompt(100, 2), 10));
  Scheduler::Planned planned = scheduler_->NextPlan(now_);
  absl::StatusOr<v1::StepReply> reply = worker_->Execute(*planned.plan);
  ASSERT_TRUE(reply.ok());
  reply->mutable_results(0)->clear_token_id();
  reply->mutable_results(0)->set_error_code(static_cast<int>(absl::StatusCode::kDataLoss));
  reply->mutable_results(0)->set_error_message("logits are not finite");
  Collect(*scheduler_->OnReply(*reply, now_));
  EXPECT_EQ(finished_.at(bad).status.code(), absl::StatusCode::kDataLoss);
  RunUntilIdle();
  EXPECT_THAT(tokens_[good], SizeIs(10));
  EXPECT_EQ(worker_->num_blocks(), 1);  // what the failed row wrote is not kept
}

TEST_F(SchedulerTest, RepliesThatDoNotFitThePlanAreRefused) {
  const std::vector<std::pair<const char*, void (*)(v1::StepReply&)>> cases = {
      {"epoch", [](v1::StepReply& r) { r.set_group_epoch(2); }},
      {"step", [](v1::StepReply& r) { r.set_step(9); }},
      {"no result", [](v1::StepReply& r) { r.clear_results(); }},
      {"other slot", [](v1::StepReply& r) { r.mutable_results(0)->set_slot(7); }},
      {"no token", [](v1::StepReply& r) { r.mutable_results(0)->clear_token_id(); }},
      {"token", [](v1::StepReply& r) { r.mutable_results(0)->set_token_id(kVocab); }},
      {"unknown block", [](v1::StepReply& r) { r.add_missing_blocks(12345); }},
  };
  for (const auto& [name, corrupt] : cases) {
    SCOPED_TRACE(name);
    Make({});
    const SequenceId id = Add(Spec(Prompt(100), 10));
    Scheduler::Planned planned = scheduler_->NextPlan(now_);
    v1::StepReply reply = *worker_->Execute(*planned.plan);
    corrupt(reply);
    EXPECT_EQ(scheduler_->OnReply(reply, now_).status().code(), absl::StatusCode::kInternal);
    const std::vector<Event> events = scheduler_->FailAll(absl::UnavailableError("gone"), now_);
    ASSERT_THAT(events, SizeIs(1));
    EXPECT_EQ(std::get<FinishEvent>(events[0]).id, id);
    EXPECT_EQ(std::get<FinishEvent>(events[0]).status, absl::UnavailableError("gone"));
    EXPECT_EQ(scheduler_->CheckIntegrity(), absl::OkStatus());
    EXPECT_EQ(scheduler_->stats().index.held_blocks, 0);
  }
}

TEST_F(SchedulerTest, ProgressCountsUpAndEstimatesFromMeasuredSteps) {
  Make({.max_num_batched_tokens = 128});
  const SequenceId id = Add(Spec(Prompt(384), 1));
  RunUntilIdle();  // every step takes 0.1 s
  std::vector<int64_t> processed;
  for (const ProgressEvent& event : progress_[id]) processed.push_back(event.processed_tokens);
  EXPECT_THAT(processed, ElementsAre(0, 128, 256, 384));
  EXPECT_FALSE(progress_[id][0].eta.has_value());
  EXPECT_NEAR(absl::ToDoubleSeconds(*progress_[id][1].eta), 0.2, 1e-6);
  EXPECT_NEAR(absl::ToDoubleSeconds(*progress_[id][3].eta), 0, 1e-6);
}

TEST_F(SchedulerTest, TimingIsMeasuredFromArrival) {
  Make({.max_num_seqs = 1});
  Add(Spec(Prompt(10, 1), 2));
  const SequenceId id = Add(Spec(Prompt(10, 2), 3));
  RunUntilIdle();  // two steps for the first request, three for the second
  const v1::Timing& timing = finished_.at(id).summary.timing();
  EXPECT_EQ(timing.queue().nanos(), 200'000'000);
  EXPECT_EQ(timing.time_to_first_token().nanos(), 300'000'000);
  EXPECT_EQ(timing.decode().nanos(), 200'000'000);
}

// Half of the pages skipped, and so much mass kept by each sample.
v1::PhaseAccounting Phase(uint64_t pages, uint64_t samples, float kept) {
  v1::PhaseAccounting phase;
  phase.set_blocks_total(pages);
  phase.set_skipped_selected_out(pages / 2);
  phase.set_page_hits(pages / 2);
  v1::MassSamples& mass = *phase.mutable_measured_mass();
  mass.set_samples(samples);
  mass.set_sum(static_cast<double>(samples) * kept);
  mass.set_minimum(kept);
  (*mass.mutable_by_permille())[static_cast<uint32_t>(1000 * kept)] = samples;
  return phase;
}

// Bug: what the prompt's tail did with the decode part was told as prefill's.
TEST_F(SchedulerTest, AccountingIsSummedByPhase) {
  Make({});
  const SequenceId id = Add(Spec(Prompt(10), 2));
  for (int step = 0; step < 2; ++step) {  // the first one ends the prompt, and has both phases
    Scheduler::Planned planned = scheduler_->NextPlan(now_);
    v1::StepReply reply = *worker_->Execute(*planned.plan);
    v1::RowAccounting& row = *reply.mutable_results(0)->mutable_accounting();
    if (step == 0) *row.mutable_prefill() = Phase(20, /*samples=*/9, /*kept=*/1);
    *row.mutable_decode() = step == 0 ? Phase(4, 1, 0.25f) : Phase(6, 99, 0.75f);
    row.set_attended_tokens(step == 0 ? 0 : 900);
    row.set_attending_rows(step == 0 ? 0 : 6);
    Collect(*scheduler_->OnReply(reply, now_));
  }
  const v1::AttentionReport& report = finished_.at(id).summary.attention();
  EXPECT_EQ(report.prefill_blocks_total(), 20u);
  EXPECT_EQ(report.prefill_blocks_skipped().selected_out(), 10u);
  EXPECT_EQ(report.decode_blocks_total(), 10u);
  EXPECT_EQ(report.decode_blocks_skipped().selected_out(), 5u);
  EXPECT_EQ(report.device_page_hits(), 15u);
  EXPECT_EQ(report.prefill_measured_mass().samples(), 9u);
  EXPECT_FLOAT_EQ(report.prefill_measured_mass().mean(), 1);
  EXPECT_EQ(report.decode_measured_mass().samples(), 100u);
  EXPECT_FLOAT_EQ(report.decode_measured_mass().mean(), 0.745f);
  EXPECT_FLOAT_EQ(report.decode_measured_mass().minimum(), 0.25f);
  EXPECT_FLOAT_EQ(report.decode_measured_mass().p1(), 0.75f);
  EXPECT_DOUBLE_EQ(report.decode_budget_tokens(), 150);
}

// Bug: one word, "not sampled", for all of these.
TEST_F(SchedulerTest, WhyMassWasNotMeasured) {
  const auto why = [&](v1::MassUnmeasured ranks, bool sparse) {
    SchedulerOptions options = Options({});
    options.mass_unmeasured = ranks;
    Make({}, options);
    SequenceSpec spec = Spec(Prompt(10), 2);
    if (sparse) spec.policy = SparsePolicy(/*tail_tokens=*/10);
    const SequenceId id = Add(std::move(spec));
    RunUntilIdle();
    const v1::AttentionReport& report = finished_.at(id).summary.attention();
    EXPECT_EQ(report.prefill_mass_unmeasured(), v1::MASS_UNMEASURED_NOTHING_COMPUTED);
    EXPECT_EQ(report.decode_mass_case(), v1::AttentionReport::kDecodeMassUnmeasured);
    return report.decode_mass_unmeasured();
  };
  EXPECT_EQ(why(v1::MASS_UNMEASURED_UNSPECIFIED, true), v1::MASS_UNMEASURED_NOT_DRAWN);
  EXPECT_EQ(why(v1::MASS_UNMEASURED_OFF, true), v1::MASS_UNMEASURED_OFF);
  EXPECT_EQ(why(v1::MASS_UNMEASURED_GPU, true), v1::MASS_UNMEASURED_GPU);
  EXPECT_EQ(why(v1::MASS_UNMEASURED_GPU, false), v1::MASS_UNMEASURED_DENSE);
}

// --- the disk tier ------------------------------------------------------------------------------

constexpr SymbolicWorkerOptions kWithDisk = {.disk_blocks = 100};

class SchedulerDiskTest : public SchedulerTest {
 protected:
  // A prompt of four full blocks is on disk and nowhere else.
  void SetUp() override {
    Make(kWithDisk);
    Add(Spec(prompt_, 1));
    RunUntilIdle();
    ASSERT_EQ(worker_->num_stored(), 4);
    Restart(kWithDisk);
    ASSERT_EQ(scheduler_->stats().stored.blocks, 4);
    ASSERT_EQ(worker_->num_blocks(), 0);
  }
  // Starts to restore for one request.
  SequenceId Begin(int64_t max_tokens) {
    SequenceSpec spec = Spec(prompt_, max_tokens);
    expected_ = Expected(spec);
    const SequenceId id = Add(std::move(spec));
    EXPECT_TRUE(Step());
    EXPECT_THAT(plan_.restores(), SizeIs(4));
    EXPECT_THAT(plan_.rows(), IsEmpty());
    EXPECT_EQ(scheduler_->stats().restoring, 1);
    return id;
  }

  const std::vector<int32_t> prompt_ = Prompt(300);
  std::vector<int32_t> expected_;
};

TEST_F(SchedulerDiskTest, APromptIsFoundOnDiskAfterARestart) {
  const SequenceId id = Begin(5);
  EXPECT_FALSE(Step());  // nothing to do but wait
  DeliverTierReport();
  ASSERT_TRUE(Step());
  EXPECT_THAT(plan_.starts(0).cached_blocks(), SizeIs(4));
  EXPECT_EQ(plan_.rows(0).begin(), 256u);
  RunUntilIdle();
  EXPECT_EQ(tokens_[id], expected_);
  EXPECT_EQ(worker_->reads(), 4);
  EXPECT_EQ(scheduler_->stats().prefix_hits, 256);
  Add(Spec(prompt_, 1));  // from memory this time
  RunUntilIdle();
  EXPECT_EQ(worker_->reads(), 4);
  EXPECT_EQ(scheduler_->stats().prefix_hits, 512);
}

TEST_F(SchedulerDiskTest, OthersRunWhileARequestWaitsForItsBlocks) {
  const SequenceId waits = Begin(5);
  const SequenceId other = Add(Spec(Prompt(200, 9), 3));
  while (Step()) {
  }
  EXPECT_THAT(tokens_[other], SizeIs(3));
  EXPECT_THAT(tokens_[waits], IsEmpty());
  RunUntilIdle();
  EXPECT_EQ(tokens_[waits], expected_);
}

TEST_F(SchedulerDiskTest, ABlockThatCannotBeReadIsComputedAndAskedForOnce) {
  worker_->FailReads(1);
  const SequenceId id = Begin(5);
  DeliverTierReport();
  ASSERT_TRUE(Step());
  EXPECT_THAT(plan_.restores(), IsEmpty());
  EXPECT_THAT(plan_.starts(0).cached_blocks(), IsEmpty());
  EXPECT_THAT(plan_.drop_blocks(), SizeIs(4));
  RunUntilIdle();
  EXPECT_EQ(tokens_[id], expected_);
}

TEST_F(SchedulerDiskTest, WhatComesTooLateIsComputed) {
  const SequenceId id = Begin(5);
  v1::TierReport first;
  first.add_restored()->set_block_id(plan_.restores(0).block_id());
  now_ += std::chrono::seconds(9);
  ASSERT_TRUE(scheduler_->OnTierReport(0, first, now_).ok());  // takes the deadline further
  now_ += std::chrono::seconds(9);
  EXPECT_FALSE(Step());
  ASSERT_EQ(scheduler_->NextDeadline(), now_ + std::chrono::seconds(1));
  now_ = *scheduler_->NextDeadline();
  const Scheduler::Planned planned = scheduler_->NextPlan(now_);
  ASSERT_TRUE(planned.plan.has_value());
  EXPECT_THAT(planned.plan->starts(0).cached_blocks(), SizeIs(1));
  EXPECT_THAT(planned.plan->drop_blocks(), SizeIs(3));
  EXPECT_FALSE(scheduler_->NextDeadline().has_value());
  EXPECT_EQ(scheduler_->CheckIntegrity(), absl::OkStatus());
  v1::TierReport late;
  late.add_restored()->set_block_id(planned.plan->drop_blocks(0));
  EXPECT_TRUE(scheduler_->OnTierReport(0, late, now_).ok());
  EXPECT_TRUE(scheduler_->Cancel(id, absl::CancelledError(""), now_).has_value());
}

// Every request with a stored prefix waited ten seconds.
TEST_F(SchedulerDiskTest, ADiskThatDoesNotAnswerIsSetAsideAndTriedAgain) {
  const auto prompt = [](int32_t seed) { return Prompt(300, 100 + seed); };
  for (int32_t seed = 0; seed < 6; ++seed) {
    Add(Spec(prompt(seed), 1));
    RunUntilIdle();
  }
  Restart(kWithDisk);
  const SequenceId first = Add(Spec(prompt(0), 1));
  ASSERT_TRUE(Step());
  EXPECT_THAT(plan_.restores(), SizeIs(4));
  now_ += std::chrono::seconds(9);
  const SequenceId second = Add(Spec(prompt(1), 1));
  ASSERT_TRUE(Step());
  EXPECT_THAT(plan_.restores(), SizeIs(4));
  now_ += std::chrono::seconds(1);  // too late for the first; the second need not wait either
  while (Step()) {
  }
  EXPECT_TRUE(finished_.contains(first) && finished_.contains(second));
  EXPECT_TRUE(scheduler_->stats().disk_set_aside);
  const SequenceId third = Add(Spec(prompt(2), 1));
  ASSERT_TRUE(Step());
  EXPECT_THAT(plan_.restores(), IsEmpty());
  while (Step()) {
  }
  EXPECT_TRUE(finished_.contains(third));
  now_ += std::chrono::seconds(5);
  const SequenceId trial = Add(Spec(prompt(3), 1));
  const SequenceId beside = Add(Spec(prompt(4), 1));
  ASSERT_TRUE(Step());
  EXPECT_THAT(plan_.restores(), SizeIs(4));
  EXPECT_THAT(plan_.starts(), SizeIs(1));  // the one beside
  now_ += std::chrono::seconds(1);
  while (Step()) {
  }
  EXPECT_TRUE(finished_.contains(trial) && finished_.contains(beside));
  now_ += std::chrono::seconds(10);
  const SequenceId last = Add(Spec(prompt(5), 1));
  ASSERT_TRUE(Step());
  EXPECT_THAT(plan_.restores(), SizeIs(4));
  RunUntilIdle();
  EXPECT_FALSE(scheduler_->stats().disk_set_aside);
  EXPECT_TRUE(finished_.contains(last));
}

TEST_F(SchedulerDiskTest, RequestsForTheSameDocumentRestoreItOnce) {
  const SequenceId first = Begin(5);
  std::vector<int32_t> longer = prompt_;
  longer.insert(longer.end(), 100, 1);
  SequenceSpec spec = Spec(longer, 5);
  const std::vector<int32_t> expected = Expected(spec);
  const SequenceId second = Add(std::move(spec));
  EXPECT_FALSE(Step());
  EXPECT_EQ(scheduler_->stats().waiting, 1);
  RunUntilIdle();
  EXPECT_EQ(tokens_[first], expected_);
  EXPECT_EQ(tokens_[second], expected);
  EXPECT_EQ(worker_->reads(), 4);
  EXPECT_EQ(scheduler_->stats().prefix_hits, 512);
}

TEST_F(SchedulerDiskTest, ACancelledRestoreLeavesNothing) {
  const SequenceId id = Begin(5);
  EXPECT_TRUE(scheduler_->Cancel(id, absl::CancelledError(""), now_).has_value());
  EXPECT_EQ(scheduler_->CheckIntegrity(), absl::OkStatus());
  RunUntilIdle();
  EXPECT_EQ(worker_->num_blocks(), 0);
  EXPECT_EQ(scheduler_->stats().index.held_blocks, 0);
  Begin(5);  // they are still stored
}

TEST_F(SchedulerDiskTest, ABlockThatARankForgotIsNotAskedFor) {
  v1::TierReport report;
  kvstore::PrefixHash hash =
      kvstore::HashScope({.tenant = "",
                          .weights_hash = std::string(32, 'w'),
                          .kv_form = "rotated/float32",
                          .prefill_policy = CanonicalBytes(DensePolicy().prefill)});
  for (size_t i = 0; i < 3; ++i) {
    hash = kvstore::HashBlock(hash, absl::MakeConstSpan(prompt_).subspan(64 * i, 64), "");
  }
  report.add_forgotten(hash.data(), hash.size());
  ASSERT_TRUE(scheduler_->OnTierReport(0, report, now_).ok());
  Add(Spec(prompt_, 1));
  ASSERT_TRUE(Step());
  EXPECT_THAT(plan_.restores(), SizeIs(2));
}

TEST_F(SchedulerDiskTest, ABlockCountsOnlyWhenEveryRankHasIt) {
  const std::unique_ptr<SymbolicWorker> disk = std::move(worker_);
  SchedulerOptions options = Options(kWithDisk);
  options.num_ranks = 2;
  Make(kWithDisk, options);
  const v1::TierReport stored = worker_->TakeOverDisk(*disk);
  ASSERT_TRUE(scheduler_->OnTierReport(1, stored, now_).ok());
  EXPECT_EQ(scheduler_->stats().stored.partly_held, 4);
  Add(Spec(prompt_, 1));
  ASSERT_TRUE(Step());
  EXPECT_THAT(plan_.restores(), IsEmpty());
  RunUntilIdle();
  Make(kWithDisk, options);
  ASSERT_TRUE(worker_->TakeOverDisk(*disk).stored_size() == 4);
  for (int64_t rank : {0, 1}) ASSERT_TRUE(scheduler_->OnTierReport(rank, stored, now_).ok());
  Begin(2);
  const v1::TierReport restored = worker_->TakeTierReport(SymbolicWorker::Disk::kDone);
  ASSERT_THAT(restored.restored(), SizeIs(4));
  ASSERT_TRUE(scheduler_->OnTierReport(1, restored, now_).ok());
  EXPECT_FALSE(Step());  // rank 0 still reads
  ASSERT_TRUE(scheduler_->OnTierReport(0, restored, now_).ok());
  ASSERT_TRUE(Step());
  EXPECT_THAT(plan_.starts(0).cached_blocks(), SizeIs(4));
}

TEST_F(SchedulerDiskTest, NothingIsStoredOrRestoredWithoutADiskOnEveryRank) {
  const std::unique_ptr<SymbolicWorker> disk = std::move(worker_);
  Make(kWithDisk, Options({}));
  ASSERT_TRUE(scheduler_->OnTierReport(0, worker_->TakeOverDisk(*disk), now_).ok());
  Add(Spec(prompt_, 1));
  ASSERT_TRUE(Step());
  EXPECT_THAT(plan_.restores(), IsEmpty());
  ASSERT_TRUE(Step());
  EXPECT_THAT(plan_.persists(), IsEmpty());
}

TEST_F(SchedulerDiskTest, BlocksThatASparseTailTouchesAreNotStored) {
  SequenceSpec sparse = Spec(Prompt(320, 5), 100);
  sparse.policy = SparsePolicy(64);
  Add(std::move(sparse));
  RunUntilIdle();
  EXPECT_EQ(worker_->num_stored(), 4 + 4);  // [0, 256)
}

TEST_F(SchedulerDiskTest, ReportsThatMakeNoSenseAreRefused) {
  v1::TierReport short_hash;
  short_hash.add_forgotten("abc");
  v1::TierReport short_block;
  short_block.add_stored()->set_prefix_hash(std::string(32, 'h'));
  for (const v1::TierReport& report : {short_hash, short_block}) {
    EXPECT_EQ(scheduler_->OnTierReport(0, report, now_).code(), absl::StatusCode::kInternal);
  }
}

// --- one step ahead of the answers --------------------------------------------------------------

class SchedulerAheadTest : public SchedulerTest {
 protected:
  // REQUIRES: there is something to plan.
  void Plan() {
    Scheduler::Planned planned = scheduler_->NextPlan(now_);
    Collect(std::move(planned.events));
    ASSERT_TRUE(planned.plan.has_value());
    plan_ = *planned.plan;
    absl::StatusOr<v1::StepReply> reply = worker_->Execute(plan_);
    ASSERT_TRUE(reply.ok()) << reply.status();
    replies_.push_back(*std::move(reply));
  }
  bool PlansNothing() { return !scheduler_->NextPlan(now_).plan.has_value(); }
  void Answer() {
    now_ += std::chrono::milliseconds(100);
    absl::StatusOr<std::vector<Event>> events = scheduler_->OnReply(replies_.front(), now_);
    ASSERT_TRUE(events.ok()) << events.status();
    replies_.pop_front();
    Collect(*std::move(events));
    ASSERT_EQ(scheduler_->CheckIntegrity(), absl::OkStatus());
  }
  // Every request has read its prompt, and nothing is unanswered.
  SequenceId AddAndRead(SequenceSpec spec) {
    const SequenceId id = Add(std::move(spec));
    EXPECT_TRUE(Step());
    return id;
  }

  std::deque<v1::StepReply> replies_;  // not taken
};

TEST_F(SchedulerAheadTest, RowsFollowOnTokensThatAreNotKnown) {
  Make({});
  AddAndRead(Spec(Prompt(62), 9));
  Plan();
  EXPECT_EQ(plan_.rows(0).begin(), 62u);
  Plan();
  EXPECT_EQ(plan_.rows(0).begin(), 63u);
  EXPECT_TRUE(plan_.rows(0).sample());
  Answer();
  Plan();
  EXPECT_EQ(plan_.rows(0).begin(), 64u);
  EXPECT_THAT(plan_.rows(0).new_blocks(), SizeIs(1));
  EXPECT_THAT(plan_.seals(), IsEmpty());  // what would fill the block is not answered
  Answer();
  Plan();
  EXPECT_THAT(plan_.seals(), SizeIs(1));
  EXPECT_EQ(scheduler_->stats().plans_ahead, 3);
}

TEST_F(SchedulerAheadTest, ARowBehindAnEndIsNobodys) {
  Make({});
  SequenceSpec spec = Spec(Prompt(62), 500);
  for (uint32_t stop : {3u, 8u, 11u}) spec.sampling.add_stop_token_ids(stop);
  const std::vector<int32_t> expected = Expected(spec);
  ASSERT_THAT(expected.size(), ::testing::AllOf(::testing::Gt(1u), ::testing::Lt(500u)));
  const SequenceId id = AddAndRead(std::move(spec));
  Plan();
  while (!finished_.contains(id)) {
    Plan();
    Answer();
  }
  EXPECT_EQ(tokens_[id], expected);
  const v1::Finish summary = finished_.at(id).summary;
  EXPECT_EQ(summary.usage().completion_tokens(), expected.size());
  EXPECT_EQ(scheduler_->unanswered_plans(), 1);
  Answer();
  EXPECT_EQ(scheduler_->stats().rows_in_vain, 1);
  RunUntilIdle();
  const auto whole = static_cast<int64_t>(62 + expected.size() - 1) / kvstore::kBlockTokens;
  EXPECT_EQ(worker_->num_blocks(), whole);  // of what it read and answered
  EXPECT_EQ(worker_->num_sequences(), 0);
}

TEST_F(SchedulerAheadTest, NothingIsPlannedBehindLastTokens) {
  Make({});
  AddAndRead(Spec(Prompt(10, 1), 2));
  Plan();
  EXPECT_TRUE(PlansNothing());
  Answer();
  EXPECT_EQ(scheduler_->stats().plans_ahead, 0);
  AddAndRead(Spec(Prompt(10, 2), 2));
  Add(Spec(Prompt(10, 3), 3));
  Plan();
  Answer();
  Plan();
  Plan();  // for the one that goes on
  EXPECT_THAT(plan_.rows(), SizeIs(1));
}

// A rank may miss blocks that the start names.
TEST_F(SchedulerAheadTest, NothingIsPlannedBehindAStart) {
  Make({});
  AddAndRead(Spec(Prompt(10, 1), 9));
  Add(Spec(Prompt(10, 2), 9));
  Plan();
  ASSERT_THAT(plan_.starts(), SizeIs(1));
  EXPECT_TRUE(PlansNothing());
  Answer();
  Plan();
  Add(Spec(Prompt(10, 3), 9));
  Plan();  // but the start itself may be ahead
  EXPECT_THAT(plan_.starts(), SizeIs(1));
  EXPECT_EQ(scheduler_->stats().plans_ahead, 1);
}

TEST_F(SchedulerAheadTest, WhoWaitsSharesWhatIsBeingRead) {
  Make({.max_num_batched_tokens = 128});
  const std::vector<int32_t> document = Prompt(300);
  Add(Spec(document, 9));
  Plan();
  Answer();
  Plan();  // [128, 256)
  Add(Spec(document, 9));
  EXPECT_TRUE(PlansNothing());
  Answer();
  Plan();
  ASSERT_THAT(plan_.starts(), SizeIs(1));
  EXPECT_THAT(plan_.starts(0).cached_blocks(), SizeIs(4));
}

TEST_F(SchedulerAheadTest, ChunksFollowChunks) {
  Make({.max_num_batched_tokens = 128});
  Add(Spec(Prompt(600), 2));
  Plan();
  Answer();
  Plan();
  Plan();
  EXPECT_EQ(plan_.rows(0).begin(), 256u);
  EXPECT_EQ(plan_.rows(0).num_tokens(), 128u);
}

TEST_F(SchedulerAheadTest, NoBlockIsTakenFromAnother) {
  Make({.host_blocks = 3});
  AddAndRead(Spec(Prompt(63, 1), 90));
  AddAndRead(Spec(Prompt(60, 2), 60));
  Plan();
  Plan();  // the first enters its second block
  for (int i = 0; i < 2; ++i) {
    Answer();
    Plan();
  }
  Answer();  // the second one's first block is full now, and no third one is free
  EXPECT_TRUE(PlansNothing());
  EXPECT_EQ(scheduler_->stats().preempted_recompute, 0);
  Answer();
  Plan();
  EXPECT_EQ(scheduler_->stats().preempted_recompute, 1);
  EXPECT_THAT(plan_.free_slots(), SizeIs(1));
}

TEST_F(SchedulerAheadTest, UnsealedBlocksStayWithinTheDevicesShare) {
  Make({.device_blocks = 3});  // a share of two
  AddAndRead(Spec(Prompt(62, 1), 9));
  AddAndRead(Spec(Prompt(10, 2), 9));
  Plan();  // fills the first one's block
  EXPECT_TRUE(PlansNothing());
  Answer();
  Plan();
  EXPECT_THAT(plan_.seals(), SizeIs(1));
}

TEST_F(SchedulerAheadTest, ACancelledRequestLeavesBehindItsRows) {
  Make({});
  const SequenceId id = AddAndRead(Spec(Prompt(10, 1), 90));
  AddAndRead(Spec(Prompt(10, 2), 90));
  Plan();
  Plan();
  ASSERT_TRUE(scheduler_->Cancel(id, absl::CancelledError(""), now_).has_value());
  Answer();
  Plan();
  EXPECT_THAT(plan_.free_slots(), SizeIs(1));
  EXPECT_THAT(plan_.rows(), SizeIs(1));
  Answer();
  Answer();
  EXPECT_EQ(scheduler_->stats().rows_in_vain, 2);
}

TEST(SchedulerOptionsTest, OptionsThatRunNothingAreRefused) {
  SchedulerOptions options = Options({});
  options.device_blocks = 0;
  EXPECT_EQ(Scheduler::Create(options, kvstore::PrefixIndex::Create(4)).status().code(),
            absl::StatusCode::kInvalidArgument);
  options = Options({});
  options.max_num_batched_tokens = 100;
  EXPECT_EQ(Scheduler::Create(options, kvstore::PrefixIndex::Create(4)).status().code(),
            absl::StatusCode::kInvalidArgument);
}

// --- random operations against a model ----------------------------------------------------------

struct Asked {
  std::vector<int32_t> expected;  // tokens, if it is left alone
  bool cancelled = false;
};

class RandomSchedulerTest : public SchedulerTest, public ::testing::WithParamInterface<uint32_t> {
 protected:
  void AddRandom() {
    // Few documents, so that prefixes are shared; cut anywhere, so that block edges are hit.
    const auto document = static_cast<int32_t>(1 + Random(3));
    std::vector<int32_t> prompt = Prompt(1 + Random(400), document);
    const int64_t question = Random(3) == 0 ? 0 : Random(100);
    for (int64_t i = 0; i < question; ++i) prompt.push_back(static_cast<int32_t>(Random(kVocab)));
    // Or an earlier prompt and some of its answer, so that answers are read as prompts.
    if (Random(3) == 0 && !conversation_.empty()) {
      prompt = conversation_;
      prompt.resize(static_cast<size_t>(1 + Random(static_cast<int64_t>(prompt.size()))));
    }
    SequenceSpec spec = Spec(std::move(prompt), 1 + Random(80));
    spec.sampling.set_seed(static_cast<uint64_t>(Random(2)));
    for (int64_t i = Random(3); i > 0; --i) {
      spec.sampling.add_stop_token_ids(static_cast<uint32_t>(Random(kVocab)));
    }
    spec.sampling.set_min_tokens(static_cast<uint32_t>(Random(2) * Random(20)));
    spec.sampling.set_min_tokens(
        std::min(spec.sampling.min_tokens(), static_cast<uint32_t>(spec.max_tokens)));
    const uint32_t tails[] = {0, 1, 64, 100};
    if (Random(3) == 0) spec.policy = SparsePolicy(tails[Random(4)]);
    if (Random(4) == 0) {
      spec.policy.prefill.mutable_streaming();
      spec.policy.prefill.set_window_tokens(64);
    }
    if (Random(5) == 0) spec.tenant = "other";
    Asked asked = {.expected = Expected(spec)};
    if (Random(3) == 0 && spec.prompt.size() < 400) {
      conversation_ = spec.prompt;
      conversation_.insert(conversation_.end(), asked.expected.begin(), asked.expected.end());
    }
    const SequenceId id = spec.id;
    const absl::Status status = scheduler_->Add(std::move(spec));
    if (status.ok()) {
      asked_.emplace(id, std::move(asked));
    } else {
      EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
    }
  }

  void CancelRandom(bool stop) {
    if (asked_.empty()) return;
    const SequenceId id(Random(next_id_));
    std::optional<FinishEvent> finish =
        stop ? scheduler_->StopEarly(id, now_)
             : scheduler_->Cancel(id, absl::CancelledError("client"), now_);
    EXPECT_EQ(finish.has_value(), asked_.contains(id) && !finished_.contains(id));
    if (!finish.has_value()) return;
    asked_.at(id).cancelled = true;
    Collect({*std::move(finish)});
  }

  // A step during which sequences may be cancelled, and what the disk has done meanwhile.
  void RandomStep() {
    now_ += std::chrono::milliseconds(Random(50));
    RunPlan();
    const v1::TierReport report = worker_->TakeTierReport(SymbolicWorker::Disk::kSome, random_());
    ASSERT_EQ(scheduler_->OnTierReport(0, report, now_), absl::OkStatus());
  }
  // Makes a plan, perhaps ahead of an answer; the rank carries it out now or when it is waited for.
  void RunPlan() {
    Scheduler::Planned planned = scheduler_->NextPlan(now_);
    Collect(std::move(planned.events));
    if (planned.plan.has_value()) plans_.push_back(*std::move(planned.plan));
    if (Random(2) == 0) ExecutePlans();
    if (Random(10) == 0) CancelRandom(false);
    if (Random(20) == 0) CancelRandom(true);
    const bool may_wait = planned.plan.has_value() && scheduler_->unanswered_plans() == 1;
    if (scheduler_->unanswered_plans() > 0 && !(may_wait && Random(4) > 0)) TakeAnswer();
  }
  void ExecutePlans() {
    while (!plans_.empty()) {
      absl::StatusOr<v1::StepReply> reply = worker_->Execute(plans_.front());
      ASSERT_TRUE(reply.ok()) << reply.status() << "\n"
                              << plans_.front().ShortDebugString().substr(0, 2000);
      replies_.push_back(*std::move(reply));
      plans_.pop_front();
    }
  }
  void TakeAnswer() {
    if (replies_.empty()) ExecutePlans();
    ASSERT_FALSE(replies_.empty());
    absl::StatusOr<std::vector<Event>> events = scheduler_->OnReply(replies_.front(), now_);
    ASSERT_TRUE(events.ok()) << events.status();
    replies_.pop_front();
    Collect(*std::move(events));
  }
  void Finish() {
    while (scheduler_->unanswered_plans() > 0) {
      TakeAnswer();
      if (HasFatalFailure()) return;
    }
    RunUntilIdle();
    EXPECT_GT(scheduler_->stats().plans_ahead, 0);
    EXPECT_GT(scheduler_->stats().rows_in_vain, 0);
  }

  void CheckAnswers() const {
    for (const auto& [id, asked] : asked_) {
      ASSERT_TRUE(finished_.contains(id)) << id;
      const auto it = tokens_.find(id);
      const std::vector<int32_t> got = it == tokens_.end() ? std::vector<int32_t>() : it->second;
      if (asked.cancelled) {
        ASSERT_LE(got.size(), asked.expected.size());
        ASSERT_TRUE(std::equal(got.begin(), got.end(), asked.expected.begin())) << id;
      } else {
        ASSERT_EQ(got, asked.expected) << id;
        ASSERT_EQ(finished_.at(id).status, absl::OkStatus());
      }
    }
    ASSERT_EQ(finished_.size(), asked_.size());
  }

  int64_t Random(int64_t below) {
    return static_cast<int64_t>(random_() % static_cast<uint64_t>(below));
  }

  std::mt19937_64 random_{GetParam()};
  std::map<SequenceId, Asked> asked_;
  std::vector<int32_t> conversation_;
  std::deque<v1::StepPlan> plans_;     // not carried out
  std::deque<v1::StepReply> replies_;  // not taken
};

TEST_P(RandomSchedulerTest, EveryRequestEndsOnceWithTheAnswerItGetsAlone) {
  const SymbolicWorkerOptions worker = {.device_blocks = 1 + Random(24),
                                        .host_blocks = 10 + Random(60),
                                        .max_num_seqs = 1 + Random(8),
                                        .max_num_batched_tokens = 64 * (1 + Random(6))};
  SchedulerOptions options = Options(worker);
  options.max_queue_len = Random(20);
  Make(worker, options);
  for (int64_t i = Iterations(2000); i > 0; --i) {
    const int64_t dice = Random(100);
    if (dice < 15) {
      AddRandom();
    } else if (dice < 20) {
      CancelRandom(Random(2) == 0);
    } else if (dice < 22) {
      worker_->LoseOneBlock(random_());
    } else {
      RandomStep();
    }
    ASSERT_EQ(scheduler_->CheckIntegrity(), absl::OkStatus()) << "seed " << GetParam();
    if (HasFatalFailure()) FAIL() << "seed " << GetParam();
  }
  Finish();
  CheckAnswers();
  EXPECT_EQ(worker_->num_sequences(), 0);
  EXPECT_EQ(scheduler_->stats().index.held_blocks, 0);
  EXPECT_LE(worker_->num_blocks(), scheduler_->stats().index.idle_blocks);
  const std::vector<Event> events = scheduler_->FailAll(absl::UnavailableError("gone"), now_);
  EXPECT_THAT(events, IsEmpty());
}

// Blocks go to disk, are evicted from memory, come back, or do not.
TEST_P(RandomSchedulerTest, TheDiskChangesNoAnswer) {
  Make({.host_blocks = 12, .max_num_seqs = 3, .disk_blocks = 10 + Random(100)});
  for (int64_t i = Iterations(2000); i > 0; --i) {
    if (Random(4) == 0) AddRandom();
    if (Random(20) == 0) CancelRandom(false);
    if (Random(50) == 0) worker_->LoseOneBlock(random_());
    if (Random(200) == 0) now_ += std::chrono::seconds(11);  // what is on its way is late
    RandomStep();
    ASSERT_EQ(scheduler_->CheckIntegrity(), absl::OkStatus()) << "seed " << GetParam();
    if (HasFatalFailure()) FAIL() << "seed " << GetParam();
  }
  Finish();
  CheckAnswers();
  EXPECT_GT(worker_->reads(), 0);
  EXPECT_EQ(scheduler_->stats().index.held_blocks, 0);
  EXPECT_LE(worker_->num_blocks(), scheduler_->stats().index.idle_blocks);
}

// Answers of up to 80 tokens, and blocks for two or three of the requests.
TEST_P(RandomSchedulerTest, PreemptionChangesNoAnswer) {
  Make({.host_blocks = 13 + Random(4), .max_num_seqs = 8, .disk_blocks = Random(2) * 50});
  for (int64_t i = Iterations(2000); i > 0; --i) {
    if (Random(3) == 0 && scheduler_->stats().waiting < 8) AddRandom();
    if (Random(30) == 0) CancelRandom(false);
    if (Random(100) == 0) worker_->LoseOneBlock(random_());
    RandomStep();
    ASSERT_EQ(scheduler_->CheckIntegrity(), absl::OkStatus()) << "seed " << GetParam();
    if (HasFatalFailure()) FAIL() << "seed " << GetParam();
  }
  Finish();
  CheckAnswers();
  const SchedulerStats stats = scheduler_->stats();
  EXPECT_GT(stats.preempted_swap + stats.preempted_recompute, 0);
  EXPECT_GT(stats.resumed_disk + stats.resumed_host + stats.resumed_recompute, 0);
  EXPECT_EQ(stats.index.held_blocks, 0);
}

TEST_P(RandomSchedulerTest, WhenTheGroupFailsEveryRequestEndsOnce) {
  Make({.host_blocks = 40, .disk_blocks = 40});
  for (int i = 0; i < 100; ++i) {
    if (Random(3) == 0) AddRandom();
    if (Random(10) == 0) CancelRandom(false);
    RandomStep();
  }
  scheduler_->NextPlan(now_);  // never answered
  Collect(scheduler_->FailAll(absl::UnavailableError("gone"), now_));
  EXPECT_EQ(finished_.size(), asked_.size());
  EXPECT_EQ(scheduler_->CheckIntegrity(), absl::OkStatus());
  EXPECT_EQ(scheduler_->stats().index.held_blocks, 0);
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomSchedulerTest, ::testing::Range(1u, 17u));

}  // namespace
}  // namespace kvasir::coordinator
