// Answers of a group of ranks, compared with those of one rank.
#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

#include "tests/worker/random_model.h"
#include "tests/worker/rank_group.h"
#include "tests/worker/test_coordinator.h"
#include "tests/worker/test_worker.h"

namespace kvasir::worker {
namespace {

TestRequest MakeRequest(uint32_t size, uint32_t policy) {
  std::vector<uint32_t> prompt(size);
  for (uint32_t i = 0; i < size; ++i) prompt[i] = (i * i + 3 * size) % 101;
  return MakeSparseRequest(std::move(prompt), policy, 12);
}

// Numbers of KV heads and of ranks.
struct Split {
  int64_t kv_heads;
  int ranks;
};

class TensorParallelTest : public testing::TestWithParam<Split> {
 protected:
  static ModelConfig Shape() {
    ModelConfig shape = RandomModelShape();
    shape.num_kv_heads = GetParam().kv_heads;
    return shape;
  }
  RankGroupOptions Options(int size) const {
    RankGroupOptions options = {.model = {.folder = model_.folder(), .edit_weights = {}},
                                .size = size};
    options.engine.mass_sample_rate = 1;
    for (const size_t ends_early : {13u, 14u}) {
      if (!EndsEarly()) options.engine.policies[ends_early].mutable_decode()->clear_terminator();
    }
    return options;
  }
  // Ranks that share a KV head cannot decide together where its rows end.
  static bool EndsEarly() { return GetParam().ranks <= GetParam().kv_heads; }

  RandomModel model_{Shape()};
};

// Anything counted per KV head or query head is counted once, on however many ranks the head lies.
void ExpectSamePages(const v1::PhaseAccounting& one, const v1::PhaseAccounting& many) {
  EXPECT_EQ(one.blocks_total(), many.blocks_total());
  EXPECT_EQ(one.skipped_selected_out(), many.skipped_selected_out());
  EXPECT_EQ(one.skipped_pruned(), many.skipped_pruned());
  EXPECT_EQ(one.skipped_terminated(), many.skipped_terminated());
  EXPECT_EQ(one.page_hits() + one.page_misses(), many.page_hits() + many.page_misses());
  EXPECT_EQ(one.measured_mass().samples(), many.measured_mass().samples());
  EXPECT_NEAR(one.measured_mass().sum(), many.measured_mass().sum(),
              1e-4 * one.measured_mass().sum());
}
void ExpectSameAccounting(const v1::RowAccounting& one, const v1::RowAccounting& many) {
  EXPECT_GT(BothPhases(one).blocks_total(), 0u);
  ExpectSamePages(one.prefill(), many.prefill());
  ExpectSamePages(one.decode(), many.decode());
  EXPECT_TRUE(std::ranges::equal(one.stages_run(), many.stages_run()));
  EXPECT_TRUE(std::ranges::equal(one.stages_reused(), many.stages_reused()));
  EXPECT_EQ(one.attended_tokens(), many.attended_tokens());
  EXPECT_EQ(one.attending_rows(), many.attending_rows());
  EXPECT_EQ(one.contract().SerializeAsString(), many.contract().SerializeAsString());
  EXPECT_EQ(one.estimated_mass().samples(), many.estimated_mass().samples());
}

TEST_P(TensorParallelTest, AnswersAsOneRankDoes) {
  RankGroup single(Options(1)), group(Options(GetParam().ranks));
  TestCoordinator one({.chunk = 128}), many({.chunk = 128});
  std::vector<uint32_t> policies = {0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 15, 16};
  if (EndsEarly()) policies.insert(policies.end(), {13, 14});
  for (const uint32_t size : {1u, 70u, 300u}) {
    for (const uint32_t policy : policies) {
      TestRequest request = MakeRequest(size, policy);
      if (size == 70) {  // penalties count the same on every rank
        request.sampling.set_repetition_penalty(1.3f);
        request.sampling.set_presence_penalty(0.5f);
        request.sampling.set_logprobs(3);
      }
      one.Add(request);
      many.Add(request);
    }
  }
  single.Run(one);
  group.Run(many);
  uint64_t skipped = 0, terminated = 0, reused = 0, mended = 0;
  for (size_t r = 0; r < 3 * policies.size(); ++r) {
    SCOPED_TRACE(testing::Message() << "request " << r);
    EXPECT_EQ(one.result(r).tokens, many.result(r).tokens);
    ExpectSameAccounting(one.result(r).accounting, many.result(r).accounting);
    const v1::PhaseAccounting pages = BothPhases(one.result(r).accounting);
    skipped += pages.skipped_selected_out();
    terminated += pages.skipped_terminated();
    const v1::ContractReport& contract = one.result(r).accounting.contract();
    mended += contract.dense() + contract.widened();
    if (one.result(r).accounting.stages_reused_size() > 0) {
      reused += one.result(r).accounting.stages_reused(0) > 0;
    }
  }
  EXPECT_GT(skipped, 0u);
  EXPECT_EQ(terminated > 0, EndsEarly());
  EXPECT_GT(mended, 0u);
  EXPECT_GE(reused, 5u) << "of the longest prompts, under each reuse rule";
  float difference = 0, largest = 0;
  for (const auto& [place, logits] : single.worker(0).logits()) {
    const TestWorker::Logits& sharded = group.worker(0).logits().at(place);
    EXPECT_EQ(sharded, group.worker(group.size() - 1).logits().at(place));
    for (size_t i = 0; i < logits.size(); ++i) {
      largest = std::max(largest, std::abs(logits[i]));
      difference = std::max(difference, std::abs(logits[i] - sharded[i]));
    }
  }
  EXPECT_GT(difference, 0);  // the sums are split: another order
  EXPECT_LT(difference, 1e-4f * largest);
}

INSTANTIATE_TEST_SUITE_P(Splits, TensorParallelTest,
                         testing::Values(Split{4, 2}, Split{4, 4}, Split{2, 4}, Split{1, 2},
                                         Split{1, 4}),
                         [](const auto& test) {
                           return std::to_string(test.param.kv_heads) + "KvHeadsOver" +
                                  std::to_string(test.param.ranks);
                         });

class TensorParallelFailureTest : public testing::Test {
 protected:
  RandomModel model_;
};

TEST_F(TensorParallelFailureTest, DeadRankIsAnErrorOnTheOthers) {
  RankGroup group({.model = {.folder = model_.folder(), .edit_weights = {}}, .size = 2});
  TestCoordinator coordinator({.chunk = 128});
  coordinator.Add(MakeRequest(70, 0));
  const v1::StepPlan first = coordinator.NextPlan();
  const auto replies = group.Step(first);
  ASSERT_TRUE(replies[0].ok()) << replies[0].status();
  coordinator.Apply(first, *replies[0]);
  group.Kill(1);
  const absl::Status status = group.Step(coordinator.NextPlan())[0].status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  group.worker(0).engine().FlushTier();  // as a worker does when its group has ended
}

TEST_F(TensorParallelFailureTest, SilentRankIsAnErrorOnTheOthersInTime) {
  RankGroup group({.model = {.folder = model_.folder(), .edit_weights = {}},
                   .size = 2,
                   .timeout = absl::Milliseconds(300)});
  TestCoordinator coordinator({.chunk = 128});
  coordinator.Add(MakeRequest(70, 0));
  // Only rank 0 gets the plan.
  const absl::Status status = group.worker(0).engine().Step(coordinator.NextPlan()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
}

TEST_F(TensorParallelFailureTest, BlockMissingOnOneRankStopsAll) {
  RankGroup group({.model = {.folder = model_.folder(), .edit_weights = {}}, .size = 2});
  TestCoordinator coordinator({.chunk = 128, .keep_blocks = true});
  const size_t r = coordinator.Add(MakeRequest(200, 0));
  group.Run(coordinator);
  // The plan that frees the slot also makes rank 1 alone forget a block.
  v1::StepPlan plan = coordinator.NextPlan();
  ASSERT_TRUE(group.Step(plan)[0].ok());
  TestRequest again = MakeRequest(200, 0);
  again.cached_blocks = {coordinator.result(r).blocks[0], coordinator.result(r).blocks[1]};
  coordinator.Add(again);
  plan = coordinator.NextPlan();
  v1::StepPlan forgetful = plan;
  forgetful.add_drop_blocks(again.cached_blocks[1]);
  std::vector<absl::StatusOr<v1::StepReply>> replies(2);
  std::thread rank_1([&] { replies[1] = group.worker(1).engine().Step(forgetful); });
  replies[0] = group.worker(0).engine().Step(plan);
  rank_1.join();
  for (const auto& reply : replies) ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(replies[0]->missing_blocks_size(), 0);
  ASSERT_EQ(replies[1]->missing_blocks_size(), 1);
  EXPECT_EQ(replies[1]->missing_blocks(0), again.cached_blocks[1]);
  EXPECT_EQ(replies[0]->results_size(), 0);
  EXPECT_EQ(replies[1]->results_size(), 0);
}

}  // namespace
}  // namespace kvasir::worker
