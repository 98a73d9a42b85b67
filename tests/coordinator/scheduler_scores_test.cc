// Log probabilities of prompts: every token of a prompt is scored once, whatever is cached,
// preempted or planned again.
#include <algorithm>
#include <random>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "coordinator/scheduling/scheduler.h"
#include "tests/coordinator/scheduler_fixture.h"

namespace kvasir::coordinator {
namespace {

class SchedulerScoresTest : public SchedulerTest {
 protected:
  SequenceSpec Scored(std::vector<int32_t> prompt, int64_t max_tokens, uint32_t top = 2) {
    SequenceSpec spec = Spec(std::move(prompt), max_tokens);
    spec.wants_prompt_logprobs = true;
    spec.sampling.set_prompt_logprobs(top);
    return spec;
  }
  int64_t CachedTokens(SequenceId id) const {
    const v1::CachedTokens& cached = finished_.at(id).summary.usage().cached_tokens();
    return int64_t{cached.device()} + cached.host() + cached.disk();
  }
};

TEST_F(SchedulerScoresTest, EveryTokenButTheFirstIsScoredOnceWhateverTheChunks) {
  for (const int64_t batched : {64, 512, 4096}) {
    Make({.max_num_batched_tokens = batched});
    for (const int64_t length : {1, 2, 64, 65, 700}) {
      const std::vector<int32_t> prompt = Prompt(length, static_cast<int32_t>(batched + length));
      SequenceSpec spec = Scored(prompt, 3);
      const std::vector<int32_t> answer = Expected(spec);
      const SequenceId id = Add(std::move(spec));
      RunUntilIdle();
      EXPECT_EQ(scores_[id], ExpectedScores(prompt)) << length << " tokens";
      EXPECT_EQ(tokens_[id], answer);
    }
  }
}

// The log probabilities of one step must fit a client's stream many times over.
TEST_F(SchedulerScoresTest, AStepScoresNoMoreOfAPromptThanAStreamHolds) {
  Make({.max_num_batched_tokens = 4096});
  Add(Scored(Prompt(3000), 1));
  Add(Spec(Prompt(900, 2), 1));
  ASSERT_TRUE(Step());
  ASSERT_EQ(plan_.rows_size(), 2);
  EXPECT_EQ(plan_.rows(0).num_tokens(), 512u);
  EXPECT_EQ(plan_.rows(0).score_end(), 512u);
  EXPECT_EQ(plan_.rows(1).num_tokens(), 900u) << "others are read as always";
  EXPECT_EQ(plan_.rows(1).score_end(), 0u);
  RunUntilIdle();
}

TEST_F(SchedulerScoresTest, ACachedPrefixIsComputedAgainAndSharedAfterwards) {
  Make({});
  const std::vector<int32_t> prompt = Prompt(300);
  Add(Spec(prompt, 2));
  RunUntilIdle();
  const SequenceId scored = Add(Scored(prompt, 2));
  RunUntilIdle();
  EXPECT_EQ(CachedTokens(scored), 0);
  EXPECT_EQ(scores_[scored], ExpectedScores(prompt));
  const SequenceId plain = Add(Spec(prompt, 2));
  RunUntilIdle();
  EXPECT_EQ(CachedTokens(plain), 256);
  EXPECT_TRUE(scores_[plain].empty());

  const std::vector<int32_t> other = Prompt(300, 2);
  Add(Scored(other, 2));
  RunUntilIdle();
  const SequenceId after = Add(Spec(other, 2));
  RunUntilIdle();
  EXPECT_EQ(CachedTokens(after), 256) << "blocks of a scored prompt are stored";
}

// A prompt that is preempted while it is read has been scored in part; that part may be found.
TEST_F(SchedulerScoresTest, APreemptedPromptGoesOnAfterWhatWasScored) {
  for (const bool caching : {true, false}) {
    SchedulerOptions options = Options({.host_blocks = 12, .max_num_batched_tokens = 128});
    options.enable_prefix_caching = caching;
    Make({.host_blocks = 12, .max_num_batched_tokens = 128}, options);
    const std::vector<int32_t> growing = Prompt(100, 5), prompt = Prompt(500, 6);
    SequenceSpec first = Spec(growing, 400);
    const std::vector<int32_t> answer = Expected(first);
    const SequenceId one = Add(std::move(first));
    ASSERT_TRUE(Step());
    const SequenceId two = Add(Scored(prompt, 200));
    RunUntilIdle();
    EXPECT_GT(scheduler_->stats().preempted_recompute, 0);
    EXPECT_EQ(tokens_[one], answer);
    EXPECT_EQ(scores_[two], ExpectedScores(prompt)) << "caching " << caching;
    EXPECT_EQ(finished_.at(two).status, absl::OkStatus());
  }
}

// As the answers of scheduler_random_test.cc, with scores; ranks lose blocks.
TEST_F(SchedulerScoresTest, RandomRequestsAreScoredOnce) {
  std::minstd_rand random(11);
  Make({.device_blocks = 24, .host_blocks = 24, .max_num_seqs = 4, .max_num_batched_tokens = 128});
  std::map<SequenceId, std::vector<float>> expected;
  for (int round = 0; round < 400; ++round) {
    if (round < 200 && random() % 3 == 0) {
      std::vector<int32_t> prompt =
          Prompt(1 + static_cast<int64_t>(random() % 400), static_cast<int32_t>(1 + random() % 3));
      const auto answer = static_cast<int64_t>(1 + random() % 200);
      if (random() % 2 == 0) {
        std::vector<float> scores = ExpectedScores(prompt);
        expected[Add(Scored(std::move(prompt), answer))] = std::move(scores);
      } else {
        expected[Add(Spec(std::move(prompt), answer))] = {};
      }
    }
    if (random() % 8 == 0) worker_->LoseOneBlock(random());
    Step();
  }
  RunUntilIdle();
  EXPECT_GT(scheduler_->stats().preempted_recompute, 0);
  int64_t whole = 0;
  for (const auto& [id, scores] : expected) {
    ASSERT_TRUE(finished_.contains(id));
    if (!finished_.at(id).status.ok()) continue;  // the rank lost KV of a running request
    EXPECT_EQ(scores_[id], scores) << id.value;
    ++whole;
  }
  EXPECT_GT(whole, 40);
}

TEST_F(SchedulerScoresTest, AReplyWithOtherScoresThanAskedIsRefused) {
  const auto refused = [&](auto&& edit) {
    Make({});
    Add(Scored(Prompt(100), 2));
    Scheduler::Planned planned = scheduler_->NextPlan(now_);
    v1::StepReply reply = worker_->Execute(*planned.plan).value();
    edit(*reply.mutable_results(0)->mutable_prompt_logprobs());
    const auto events = scheduler_->OnReply(reply, now_);
    return events.status().code() == absl::StatusCode::kInternal;
  };
  EXPECT_FALSE(refused([](v1::PromptLogprobs&) {}));
  EXPECT_TRUE(refused([](v1::PromptLogprobs& scores) { scores.Clear(); }));
  EXPECT_TRUE(refused([](v1::PromptLogprobs& scores) { scores.add_logprobs(0); }));
  EXPECT_TRUE(refused([](v1::PromptLogprobs& scores) { scores.set_index(2); }));
  EXPECT_TRUE(refused([](v1::PromptLogprobs& scores) { scores.add_top_token_ids(0); }));
  EXPECT_TRUE(refused([](v1::PromptLogprobs& scores) { scores.clear_top_logprobs(); }));
}

}  // namespace
}  // namespace kvasir::coordinator
