// Engines of several ranks, each on its own thread, over real sockets.
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

#include "tests/worker/parallel/relay.h"
#include "tests/worker/random_model.h"
#include "tests/worker/test_coordinator.h"
#include "tests/worker/test_worker.h"
#include "worker/parallel/gloo_collective.h"

namespace kvasir::worker {
namespace {

// Sends each plan to all ranks and compares what they answer.
class Group {
 public:
  Group(const std::string& folder, int size, absl::Duration timeout = absl::Seconds(20)) {
    Relay relay(size);
    ranks_.resize(static_cast<size_t>(size));
    OnAllRanks([&](int rank) {
      Rank& r = ranks_[static_cast<size_t>(rank)];
      r.model = TestWorker::LoadTransformer(
          {.folder = folder, .rank = rank, .num_ranks = size, .edit_weights = {}});
      r.collective = GlooCollective::Connect({.rank = rank, .size = size, .timeout = timeout},
                                             relay.rank(rank))
                         .value();
      r.worker = std::make_unique<TestWorker>(*r.model, *r.collective);
    });
  }

  TestWorker& worker(int rank) { return *ranks_[static_cast<size_t>(rank)].worker; }
  // As if the process were killed: its sockets close.
  void Kill(int rank) { ranks_[static_cast<size_t>(rank)].collective.reset(); }

  std::vector<absl::StatusOr<v1::StepReply>> Step(const v1::StepPlan& plan) {
    std::vector<absl::StatusOr<v1::StepReply>> replies(ranks_.size());
    OnAllRanks([&](int rank) {
      if (ranks_[static_cast<size_t>(rank)].collective == nullptr) return;
      replies[static_cast<size_t>(rank)] = worker(rank).engine().Step(plan);
    });
    return replies;
  }

  void Run(TestCoordinator& coordinator) {
    while (!coordinator.done()) {
      const v1::StepPlan plan = coordinator.NextPlan();
      const auto replies = Step(plan);
      for (const auto& reply : replies) {
        ASSERT_TRUE(reply.ok()) << reply.status();
        EXPECT_EQ(reply->token_hash(), replies[0]->token_hash());
      }
      ASSERT_NO_FATAL_FAILURE(coordinator.Apply(plan, *replies[0]));
    }
  }

 private:
  struct Rank {
    std::unique_ptr<Transformer> model;
    std::unique_ptr<Collective> collective;
    std::unique_ptr<TestWorker> worker;
  };

  void OnAllRanks(const std::function<void(int)>& body) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < std::ssize(ranks_); ++rank) threads.emplace_back(body, rank);
    for (std::thread& thread : threads) thread.join();
  }

  std::vector<Rank> ranks_;
};

TestRequest MakeRequest(uint32_t size, uint32_t policy) {
  TestRequest request = {.prompt = std::vector<uint32_t>(size),
                         .max_tokens = 12,
                         .policy = policy,
                         .prefill = MakeNumbers(32, 100, 128),
                         .decode = MakeNumbers(16, 70, 64),
                         .tail_tokens = 20,
                         .sampling = Greedy(),
                         .cached_blocks = {}};
  for (uint32_t i = 0; i < size; ++i) request.prompt[i] = (i * i + 3 * size) % 101;
  return request;
}

class TensorParallelTest : public testing::TestWithParam<int> {
 protected:
  RandomModel model_;
};

TEST_P(TensorParallelTest, AnswersAsOneRankDoes) {
  const auto whole = TestWorker::LoadTransformer({.folder = model_.folder(), .edit_weights = {}});
  TestWorker single(*whole);
  Group group(model_.folder(), GetParam());
  TestCoordinator one({.chunk = 128}), many({.chunk = 128});
  for (const uint32_t size : {1u, 70u, 300u}) {
    for (const uint32_t policy : {0u, 3u}) {
      one.Add(MakeRequest(size, policy));
      many.Add(MakeRequest(size, policy));
    }
  }
  single.Run(one);
  group.Run(many);
  for (size_t r = 0; r < 6; ++r) EXPECT_EQ(one.result(r).tokens, many.result(r).tokens);
  float difference = 0, largest = 0;
  for (const auto& [place, logits] : single.logits()) {
    const TestWorker::Logits& sharded = group.worker(0).logits().at(place);
    EXPECT_EQ(sharded, group.worker(GetParam() - 1).logits().at(place));
    for (size_t i = 0; i < logits.size(); ++i) {
      largest = std::max(largest, std::abs(logits[i]));
      difference = std::max(difference, std::abs(logits[i] - sharded[i]));
    }
  }
  EXPECT_GT(difference, 0);  // the sums are split: another order
  EXPECT_LT(difference, 1e-4f * largest);
}

INSTANTIATE_TEST_SUITE_P(Sizes, TensorParallelTest, testing::Values(2, 4));

class TensorParallelFailureTest : public testing::Test {
 protected:
  RandomModel model_;
};

TEST_F(TensorParallelFailureTest, DeadRankIsAnErrorOnTheOthers) {
  Group group(model_.folder(), 2);
  TestCoordinator coordinator({.chunk = 128});
  coordinator.Add(MakeRequest(70, 0));
  const v1::StepPlan first = coordinator.NextPlan();
  const auto replies = group.Step(first);
  ASSERT_TRUE(replies[0].ok()) << replies[0].status();
  coordinator.Apply(first, *replies[0]);
  group.Kill(1);
  const absl::Status status = group.Step(coordinator.NextPlan())[0].status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
}

TEST_F(TensorParallelFailureTest, SilentRankIsAnErrorOnTheOthersInTime) {
  Group group(model_.folder(), 2, absl::Milliseconds(300));
  TestCoordinator coordinator({.chunk = 128});
  coordinator.Add(MakeRequest(70, 0));
  // Only rank 0 gets the plan.
  const absl::Status status = group.worker(0).engine().Step(coordinator.NextPlan()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
}

TEST_F(TensorParallelFailureTest, BlockMissingOnOneRankStopsAll) {
  Group group(model_.folder(), 2);
  TestCoordinator coordinator({.chunk = 128, .keep_blocks = true});
  const size_t r = coordinator.Add(MakeRequest(200, 0));
  group.Run(coordinator);
  // The plan that lets go of the slot also makes rank 1 alone forget a block.
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
