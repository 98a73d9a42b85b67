// How a step is divided among requests, and which blocks requests share.
#include "coordinator/scheduling/scheduler.h"

#include <algorithm>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/coordinator/scheduler_fixture.h"

namespace kvasir::coordinator {
namespace {

using ::testing::SizeIs;

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

// Bug: short prompts waited until the long one was read, 8 s for 2,000 tokens on a CPU.
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
  EXPECT_EQ(scheduler_->stats().missed_absent, 256);
  EXPECT_EQ(scheduler_->stats().missed_unshared, 2 * 44);
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
  EXPECT_EQ(scheduler_->stats().missed_disabled, 600);
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

}  // namespace
}  // namespace kvasir::coordinator
