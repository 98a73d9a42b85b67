#include "worker/engine/engine.h"

#include <vector>

#include "gtest/gtest.h"

#include "tests/worker/engine_fixture.h"

namespace kvasir::worker {
namespace {

using AllLogits = std::map<std::pair<int64_t, int64_t>, TestWorker::Logits>;

// Runs for every policy.
class EnginePolicyTest : public EngineTest, public testing::WithParamInterface<uint32_t> {};

TEST_P(EnginePolicyTest, ChunksDoNotChangeLogits) {
  for (const int64_t prompt_size : {1, 64, 65, 500}) {
    const TestRequest request = MakeRequest(prompt_size, GetParam());
    const AllLogits whole = RunAlone(request, 4096);
    ASSERT_EQ(whole.size(), 8u);
    for (const int64_t chunk : {64, 128, 512}) {
      SCOPED_TRACE(testing::Message() << "prompt " << prompt_size << ", chunks of " << chunk);
      ExpectSameBits(whole, RunAlone(request, chunk));
    }
  }
}

// The prompt in chunks, then tokens already generated as rows of their own, and then on as if there
// had been no pause.
TEST_P(EnginePolicyTest, PreemptionDoesNotChangeLogits) {
  TestRequest request = MakeRequest(100, GetParam());
  request.max_tokens = 150;
  TestWorker whole(*model_);
  TestCoordinator coordinator({.chunk = 128, .keep_blocks = true});
  const size_t r = coordinator.Add(request);
  whole.Run(coordinator);
  const std::vector<uint32_t> tokens = coordinator.result(r).tokens;
  const std::vector<uint64_t> blocks = coordinator.result(r).blocks;
  const auto resume = [&](size_t had) {
    TestRequest resumed = request;
    resumed.generated.assign(tokens.begin(), tokens.begin() + static_cast<int64_t>(had));
    resumed.max_tokens -= static_cast<int64_t>(had);
    return resumed;
  };
  const auto from = [&](const AllLogits& all, size_t had) {
    AllLogits later;
    for (const auto& [place, logits] : all) {
      if (place.second >= 99 + static_cast<int64_t>(had)) later[{0, place.second}] = logits;
    }
    return later;
  };
  for (const size_t had : {1u, 28u, 90u, 149u}) {
    for (const int64_t chunk : {64, 4096}) {
      SCOPED_TRACE(testing::Message() << had << " generated, chunks of " << chunk);
      ExpectSameBits(from(whole.logits(), had), RunAlone(resume(had), chunk));
    }
  }
  // The blocks that it filled itself are cached, up to the middle of the generated tokens.
  TestRequest resumed = resume(120);
  resumed.cached_blocks.assign(blocks.begin(), blocks.begin() + 3);
  const AllLogits before = whole.logits();
  const size_t again = coordinator.Add(resumed);
  whole.Run(coordinator);
  ExpectSameBits(from(before, 120), from(whole.logits(), 120));
  const std::vector<uint32_t> rest(tokens.begin() + 120, tokens.end());
  EXPECT_EQ(coordinator.result(again).tokens, rest);
}

TEST_P(EnginePolicyTest, TruncatedSequenceGoesOnAsIfItHadNotBeenThere) {
  const TestRequest request = MakeRequest(100, GetParam());
  const AllLogits fresh = RunAlone(request);
  TestWorker worker(*model_);
  TestCoordinator coordinator({.chunk = 128});
  coordinator.Add(request);
  // Prompt, then two generated tokens.
  for (int i = 0; i < 3; ++i) {
    const v1::StepPlan plan = coordinator.NextPlan();
    const auto reply = worker.engine().Step(plan);
    ASSERT_TRUE(reply.ok()) << reply.status();
    coordinator.Apply(plan, *reply);
  }
  // The same row again, as after a rejected provisional token: bounds and KV of the two are
  // discarded.
  v1::StepPlan again;
  again.set_group_epoch(1);
  again.set_step(100);
  v1::StepRow& row = *again.add_rows();
  row.set_begin(100);
  row.set_num_tokens(1);
  row.set_sample(true);
  const AllLogits before = worker.logits();
  const auto reply = worker.engine().Step(again);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(worker.logits(), before);
  EXPECT_EQ(worker.logits().at({0, 100}), fresh.at({0, 100}));
}

TEST_P(EnginePolicyTest, AccountsForEveryPage) {
  TestWorker worker(*model_);
  TestCoordinator coordinator({.chunk = 128});
  TestRequest request = MakeRequest(500, GetParam());
  request.decode.set_token_budget(3);  // in fewer pages than there are, also token by token
  const size_t r = coordinator.Add(request);
  worker.Run(coordinator);
  const v1::PhaseAccounting a = BothPhases(coordinator.result(r).accounting);
  EXPECT_GT(a.blocks_total(), 0u);
  EXPECT_EQ(a.page_hits() + a.page_misses() + a.skipped_selected_out() + a.skipped_window() +
                a.skipped_pruned() + a.skipped_terminated(),
            a.blocks_total());
  EXPECT_EQ(a.skipped_pruned() > 0, GetParam() == kPruned);
  EXPECT_EQ(a.skipped_window() > 0, GetParam() == kStreaming);
  EXPECT_EQ(a.skipped_terminated() > 0, GetParam() == kTerminated);
  EXPECT_EQ(a.skipped_selected_out() > 0, GetParam() >= kQuest && GetParam() != kTerminated);
}

INSTANTIATE_TEST_SUITE_P(Policies, EnginePolicyTest,
                         testing::Values(kAll, kStreaming, kQuest, kAllThenQuest, kTokenSelect,
                                         kHip, kInfiniteHip, kPruned, kHipByInterval,
                                         kTokenSelectByCosine, kInfiniteHipByBoth, kTerminated));

TEST_F(EngineTest, PlansAheadOfAnswersChangeNoLogits) {
  const auto add = [](TestCoordinator& coordinator) {
    for (uint32_t policy = kAll; policy <= kTerminated; ++policy) {
      if (policy == 11 || policy == 12) continue;
      coordinator.Add(MakeRequest(60 + 20 * policy, policy, policy));
    }
  };
  TestWorker one_by_one(*model_), ahead(*model_);
  TestCoordinator answered({.chunk = 64}), unanswered({.chunk = 64});
  add(answered);
  add(unanswered);
  one_by_one.Run(answered);
  ahead.RunAhead(unanswered);
  ExpectSameBits(one_by_one.logits(), ahead.logits());
}

}  // namespace
}  // namespace kvasir::worker
