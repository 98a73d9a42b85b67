// A group of GPUs against one: one process per rank, as they are served. Compares the same requests
// over a reference model, the logits that tokens are sampled from, and the tokens; and checks the
// reaction of the other ranks when one is gone. A group also shares one GPU: then its processes
// take turns there, and a rank that waits for another waits for its turn, too.
#include <algorithm>
#include <chrono>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "kernels/base/status_macros.h"
#include "tests/worker/model/golden.h"
#include "tests/worker/parallel/rank_processes.h"
#include "tests/worker/test_coordinator.h"
#include "tests/worker/test_worker.h"
#include "worker/backend/cuda/cuda_backend.h"
#include "worker/parallel/gather_values.h"
#include "worker/parallel/gloo_collective.h"
#include "xxhash.h"

namespace kvasir::worker {
namespace {

constexpr char kModel[] = "tests/model/needle-8k";
constexpr char kText[] = "tests/model/golden/needle-8k.safetensors";
// Share of the largest logit: sums in another order through six layers, and pages that are chosen
// or not.
constexpr float kTolerance = 0.1f;
constexpr int64_t kAnswer = 16;
constexpr int64_t kSlots = 12;
constexpr uint32_t kPolicies = 6;
constexpr uint32_t kFirstReusing = 4;
// A step of one chunk is too large for sums among peers, a step of decode rows small enough.
constexpr int64_t kChunk = 256;
constexpr int kTooFewGpus = 77;  // exit status

EngineOptions Options() {
  EngineOptions options = TestWorker::DefaultOptions();
  v1::SparsityPolicy infinitehip = MakePolicy("infinitehip", "infinitehip");
  infinitehip.mutable_prefill()->mutable_infinitehip()->set_preset("5k");
  infinitehip.mutable_decode()->mutable_infinitehip()->set_preset("5k");
  infinitehip.mutable_decode()->set_top_p(1);
  options.policies = {MakePolicy("all", "all"),
                      MakePolicy("quest", "quest"),
                      MakePolicy("tokenselect", "tokenselect"),
                      infinitehip,
                      MakeLayerPolicy("tokenselect", "cosine"),
                      MakeLayerPolicy("infinitehip", "both")};
  options.kv_dtype = kernels::DType::kBFloat16;
  options.kv.device = 256 << 20;
  options.kv.host = 256 << 20;
  options.max_num_batched_tokens = kSlots * kChunk;
  return options;
}

// One to twelve at a time, two of each policy. With few pages one more or less changes the answer,
// and ranks that differ slightly may choose another.
std::vector<TestRequest> Requests() {
  const std::vector<uint32_t> text = GoldenFile(kText).Run(8000).tokens;
  std::vector<TestRequest> requests;
  for (uint32_t i = 0; i < 2 * kPolicies; ++i) {
    const int64_t begin = 300 * i, size = 65 + 310 * i;
    requests.push_back({.prompt = {text.begin() + begin, text.begin() + begin + size},
                        .max_tokens = kAnswer - i % 3,
                        .policy = i % kPolicies,
                        .prefill = MakeNumbers(32, 128, 512),
                        .decode = MakeNumbers(16, 128, 512),
                        .tail_tokens = 20,
                        .sampling = Greedy(),
                        .cached_blocks = {}});
    if (requests.back().policy == 3) requests.back().decode.set_top_p(0.9f);
    if (requests.back().policy >= kFirstReusing) {
      v1::ReusePolicy& reuse = *requests.back().decode.mutable_reuse();
      reuse.set_theta(0.9f);
      reuse.set_theta_force(0.5f);
      reuse.set_max_age(20);
    }
  }
  return requests;
}

struct Answers {
  std::map<std::pair<int64_t, int64_t>, TestWorker::Logits> logits;
  std::vector<std::vector<uint32_t>> tokens;
};

// Steps follow each other, or begin ahead of the answers.
enum class Steps { kInTurn, kAhead };

Answers Serve(TestModel& model, Collective& ranks, Steps steps) {
  TestWorker worker(model, ranks, Options());
  TestCoordinator coordinator({.num_slots = kSlots, .chunk = kChunk});
  const std::vector<TestRequest> requests = Requests();
  for (const TestRequest& request : requests) coordinator.Add(request);
  steps == Steps::kAhead ? worker.RunAhead(coordinator) : worker.Run(coordinator);
  EXPECT_EQ(worker.engine().fed_steps() > 0, steps == Steps::kAhead);
  Answers answers = {.logits = worker.logits(), .tokens = {}};
  for (size_t r = 0; r < requests.size(); ++r) {
    EXPECT_TRUE(coordinator.result(r).status.ok()) << coordinator.result(r).status;
    answers.tokens.push_back(coordinator.result(r).tokens);
  }
  return answers;
}

// Compares up to the first token that differs: after it the two read different texts.
void ExpectAlike(const Answers& one, const Answers& many) {
  const std::vector<TestRequest> requests = Requests();
  int64_t compared = 0;
  for (size_t r = 0; r < requests.size(); ++r) {
    for (size_t i = 0; i < one.tokens[r].size(); ++i) {
      SCOPED_TRACE(testing::Message() << "request " << r << ", token " << i);
      const std::pair<int64_t, int64_t> place = {
          static_cast<int64_t>(r), std::ssize(requests[r].prompt) - 1 + static_cast<int64_t>(i)};
      LogitsDifference difference;
      difference.Add(one.logits.at(place), many.logits.at(place));
      EXPECT_LE(difference.largest, kTolerance * difference.scale);
      ++compared;
      if (one.tokens[r][i] == many.tokens[r][i]) continue;
      const float margin = TopTwoMargin(one.logits.at(place));
      std::cout << "request " << r << ", token " << i << " differs, top-2 margin " << margin
                << std::endl;
      EXPECT_LE(margin, 2 * difference.largest);
      break;
    }
  }
  EXPECT_GT(compared, 4 * std::ssize(requests)) << "answers differ at once";
}

uint64_t HashOf(const Answers& answers) {
  uint64_t hash = 0;
  for (const auto& [place, logits] : answers.logits) {
    hash = XXH3_64bits_withSeed(logits.data(), logits.size() * sizeof(float), hash);
  }
  return hash;
}

struct Group {
  int size = 2;
  bool shares_gpu = false;  // all ranks are on one GPU
  int64_t kv_heads = 0;  // of a random model with so few that ranks share one; 0: the test's model
};

TestWorkerOptions ModelOptions(const Group& group, int rank, int size) {
  return {.folder = kModel,
          .dummy_weights = group.kv_heads != 0,
          .num_kv_heads = group.kv_heads,
          .rank = rank,
          .num_ranks = size,
          .dtype = kernels::DType::kBFloat16,
          .max_model_len = 8192,
          .num_threads = 2,
          .device = "cuda",
          .edit_weights = {}};
}

// Waits for the other ranks. From then on they may be silent for only a few seconds; null: failed.
using Meet = std::function<std::unique_ptr<Collective>()>;

// Runs `body` where there is a GPU for each rank, or one that they share.
int RunRank(int rank, const Group& group, Rendezvous& rendezvous,
            const std::function<void(TestModel& model, const Meet& meet)>& body) {
  const int size = group.size;
  int devices = 0;
  const int needed = group.shares_gpu ? 1 : size;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices < needed) return kTooFewGpus;
  cudaSetDevice(group.shares_gpu ? 0 : rank);
  TestModel model(ModelOptions(group, rank, size));
  body(model, [&]() -> std::unique_ptr<Collective> {
    auto ranks = GlooCollective::Connect({.rank = rank, .size = size, .timeout = absl::Seconds(4)},
                                         rendezvous);
    EXPECT_TRUE(ranks.ok()) << ranks.status();
    return ranks.ok() ? std::move(*ranks) : nullptr;
  });
  return testing::Test::HasFailure() ? 1 : 0;
}

bool TooFew(const std::vector<int>& statuses) {
  return WIFEXITED(statuses[0]) && WEXITSTATUS(statuses[0]) == kTooFewGpus;
}

class CudaParallelTest : public testing::TestWithParam<Group> {};

// Runs twice, as groups come and go while a worker keeps its model. Steps that begin ahead change
// no bit.
TEST_P(CudaParallelTest, RanksAnswerAsOneDoes) {
  const Group& group = GetParam();
  const auto run = [&](int rank, Rendezvous& rendezvous) {
    return RunRank(rank, group, rendezvous, [&](TestModel& model, const Meet& meet) {
      Answers one;
      if (rank == 0) {
        TestModel alone(ModelOptions(group, 0, 1));
        SingleCollective nobody;
        one = Serve(alone, nobody, Steps::kInTurn);
      }
      const std::unique_ptr<Collective> ranks = meet();
      ASSERT_NE(ranks, nullptr);
      const ShardPlan& shard = model.transformer().options().shard;
      EXPECT_EQ(shard.kv_replicas,
                group.kv_heads == 0 ? std::max(1, group.size / 4) : group.size / group.kv_heads);
      std::vector<uint64_t> rounds;
      for (const Steps steps : {Steps::kInTurn, Steps::kAhead}) {
        const absl::Status joined = model.transformer().backend().JoinRanks(*ranks);
        ASSERT_TRUE(joined.ok()) << joined;
        const Answers many = Serve(model, *ranks, steps);
        if (rank == 0) ExpectAlike(one, many);
        const auto hashes = GatherValues(*ranks, HashOf(many));
        ASSERT_TRUE(hashes.ok()) << hashes.status();
        EXPECT_EQ(hashes->back(), hashes->front()) << "ranks have other logits";
        rounds.push_back(hashes->front());
      }
      EXPECT_EQ(rounds[0], rounds[1]) << "steps ahead have other logits";
      const auto& backend = static_cast<CudaBackend&>(model.transformer().backend());
      EXPECT_GT(backend.graphs().stats().replayed, 0);
    });
  };
  const std::vector<int> statuses = RunRankProcesses(group.size, run);
  if (TooFew(statuses)) GTEST_SKIP() << "too few GPUs on this machine";
  for (const int status : statuses) EXPECT_EQ(status, 0);
}

std::string NameOf(const testing::TestParamInfo<Group>& test) {
  const Group& group = test.param;
  return std::to_string(group.size) + (group.shares_gpu ? "OnOneGpu" : "Gpus") +
         (group.kv_heads == 0 ? "" : "Share" + std::to_string(group.kv_heads) + "KvHeads");
}
INSTANTIATE_TEST_SUITE_P(Sizes, CudaParallelTest,
                         testing::Values(Group{2}, Group{4}, Group{8}, Group{2, true},
                                         Group{2, false, 1}, Group{4, false, 2}, Group{8, false, 2},
                                         Group{2, true, 1}),
                         NameOf);

// Begins two steps, the second ahead of the answer to the first. Returns the first error.
absl::Status StepTwice(Engine& engine, TestCoordinator& coordinator) {
  KVASIR_RETURN_IF_ERROR(engine.Begin(coordinator.NextPlan()));
  const v1::StepPlan second = coordinator.NextPlan();
  EXPECT_TRUE(engine.MayBegin(second));
  KVASIR_RETURN_IF_ERROR(engine.Begin(second));
  return engine.Finish().status();
}

// Rank 1 gets `signal` in the middle of an answer, while rank 0 steps ahead.
void ExpectErrorInTime(int signal) {
  constexpr int kStepsBefore = 8;
  const std::vector<int> statuses = RunRankProcesses(2, [&](int rank, Rendezvous& rendezvous) {
    return RunRank(rank, {.size = 2}, rendezvous, [&](TestModel& model, const Meet& meet) {
      const std::unique_ptr<Collective> ranks = meet();
      ASSERT_NE(ranks, nullptr);
      const absl::Status joined = model.transformer().backend().JoinRanks(*ranks);
      ASSERT_TRUE(joined.ok()) << joined;
      TestWorker worker(model, *ranks, Options());
      TestCoordinator coordinator({.num_slots = kSlots, .chunk = kChunk});
      coordinator.Add(Requests()[1]);
      for (int step = 0; step < kStepsBefore; ++step) {
        const v1::StepPlan plan = coordinator.NextPlan();
        const auto reply = worker.engine().Step(plan);
        ASSERT_TRUE(reply.ok()) << reply.status();
        coordinator.Apply(plan, *reply);
      }
      std::cout << "rank " << rank << ": " << kStepsBefore << " steps done" << std::endl;
      if (rank == 1) raise(signal);
      const auto begin = std::chrono::steady_clock::now();
      const absl::Status status = StepTwice(worker.engine(), coordinator);
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
      std::cout << "after " << took.count() << " s: " << status << std::endl;
      EXPECT_TRUE(absl::IsDeadlineExceeded(status) || absl::IsUnavailable(status)) << status;
      EXPECT_LT(took.count(), 5);
      // The remains of the group do not disturb the next.
      SingleCollective nobody;
      EXPECT_TRUE(model.transformer().backend().JoinRanks(nobody).ok());
      EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    });
  });
  if (TooFew(statuses)) GTEST_SKIP() << "fewer than 2 GPUs on this machine";
  EXPECT_EQ(statuses[0], 0);
  EXPECT_TRUE(WIFSIGNALED(statuses[1]));
}

TEST(CudaParallelFailureTest, AKilledRankIsAnErrorOnTheOtherInTime) { ExpectErrorInTime(SIGKILL); }

TEST(CudaParallelFailureTest, AStoppedRankIsAnErrorOnTheOtherInTime) { ExpectErrorInTime(SIGSTOP); }

}  // namespace
}  // namespace kvasir::worker
