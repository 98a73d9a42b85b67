// The engine on a GPU against the engine on the CPU: the same requests over a reference model, the
// logits that tokens are sampled from, the tokens, and the attended pages. Where a selection
// depends on a near tie, the GPU may decide it differently: then the CPU's own logits must move as
// far when its attention is rounded differently.
#include <algorithm>
#include <cmath>
#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <iostream>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "kernels/base/buffer.h"
#include "kernels/sampling/sampling.h"
#include "tests/worker/model/golden.h"
#include "tests/worker/test_coordinator.h"
#include "tests/worker/test_worker.h"
#include "worker/backend/cuda/cuda_backend.h"
#include "worker/batch/row_sampling.h"

namespace kvasir::worker {
namespace {

constexpr char kModel[] = "tests/model/needle-8k";
constexpr char kText[] = "tests/model/golden/needle-8k.safetensors";
// Share of the largest logit: sums of bfloat16 products in another order, through six layers.
constexpr float kTolerance = 0.05f;
constexpr int64_t kLayers = 6;  // of the model
constexpr int64_t kAnswer = 16;
constexpr int64_t kSlots = 16;
constexpr int64_t kChunk = 256;  // of a prompt in a step
constexpr int64_t kContext = 16384;
// How often the CPU rounds differently, and how far the GPU's differences may exceed the CPU's own.
constexpr uint64_t kRoundings = 8;
constexpr float kBeyondRounding = 1.5f;

v1::SparsityPolicy MakeInfiniteHip() {
  v1::SparsityPolicy policy = MakePolicy("infinitehip", "infinitehip");
  policy.mutable_prefill()->mutable_infinitehip()->set_preset("5k");
  policy.mutable_decode()->mutable_infinitehip()->set_preset("5k");
  return policy;
}

v1::SparsityPolicy MakeEnding(v1::SparsityPolicy policy) {
  policy.mutable_decode()->mutable_art()->set_guard("none");  // bounds seldom let a row end so soon
  return policy;
}

v1::SparsityPolicy MakeEndingByImportance() {
  v1::SparsityPolicy policy = MakeEnding(MakePolicy("all", "quest"));
  policy.mutable_decode()->mutable_art()->set_order("importance");
  return policy;
}

v1::SparsityPolicy MakePruning(v1::SparsityPolicy policy) {
  policy.mutable_decode()->set_top_p(1);  // each request says how much to keep
  return policy;
}

constexpr uint32_t kNumPolicies = 21;
constexpr uint32_t kFirstPruning = 6;
constexpr uint32_t kFirstEnding = 9;  // the first of these also prunes
constexpr uint32_t kAllEnding = 10;
constexpr uint32_t kFirstReusing = 11;    // the first of these also prunes
constexpr uint32_t kFirstComparing = 17;  // the first of those that compare queries for reuse
constexpr uint32_t kEndingByImportance = 20;

constexpr bool Prunes(uint32_t policy) {
  return (policy >= kFirstPruning && policy < kAllEnding) || policy == kFirstReusing;
}
constexpr bool Ends(uint32_t policy) {
  return policy == kFirstEnding || policy == kAllEnding || policy == kEndingByImportance;
}
constexpr bool Reuses(uint32_t policy) {
  return policy >= kFirstReusing && policy < kEndingByImportance;
}
constexpr bool ComparesQueries(uint32_t policy) {
  return policy >= kFirstComparing && policy < kEndingByImportance;
}

EngineOptions Options() {
  EngineOptions options = TestWorker::DefaultOptions();
  options.policies = {MakePolicy("all", "all"),
                      MakePolicy("quest", "quest"),
                      MakePolicy("all", "quest"),
                      MakePolicy("tokenselect", "tokenselect"),
                      MakeInfiniteHip(),
                      MakePolicy("streaming", "streaming"),
                      MakePruning(MakePolicy("all", "quest")),
                      MakePruning(MakePolicy("quest", "tokenselect")),
                      MakePruning(MakeInfiniteHip()),
                      MakeEnding(MakePruning(MakeInfiniteHip())),
                      MakeEnding(MakePolicy("all", "all")),
                      MakePruning(MakeReusingPolicy("quest", "interval")),
                      MakeReusingPolicy("quest", "interval"),
                      MakeReusingPolicy("tokenselect", "interval"),
                      MakeReusingPolicy("hip", "interval"),
                      MakeReusingPolicy("infinitehip", "interval"),
                      MakeLayerPolicy("infinitehip", "interval"),
                      MakeReusingPolicy("tokenselect", "cosine"),
                      MakeReusingPolicy("infinitehip", "both"),
                      MakeLayerPolicy("tokenselect", "cosine"),
                      MakeEndingByImportance()};
  options.kv_dtype = kernels::DType::kBFloat16;
  options.kv.device = 512 << 20;
  options.kv.host = 512 << 20;
  options.max_num_batched_tokens = kSlots * kChunk;
  return options;
}

constexpr kernels::GroupedPositions kGrouped = {.group_size = 4, .window = 500};

// Policies that estimate attention do not support grouped positions.
EngineOptions GroupedOptions() {
  EngineOptions options = Options();
  for (uint32_t policy = 0; policy < kNumPolicies; ++policy) {
    if (Prunes(policy) || Ends(policy)) options.policies[policy] = MakePolicy("all", "all");
  }
  return options;
}

class CudaEngineTest : public testing::Test {
 protected:
  struct Run {
    std::map<std::pair<int64_t, int64_t>, TestWorker::Logits> logits;
    std::vector<TestResult> results;
    kvstore::KvStoreStats stats;
  };

  static void SetUpTestSuite() {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) return;
    text_ = GoldenFile(kText).Run(8000).tokens;
    for (const std::string device : {"cpu", "cuda"}) {
      models_.push_back(MakeModel(device, PositionExtension::kNone));
      extended_models_.push_back(MakeModel(device, PositionExtension::kStreaming));
      grouped_models_.push_back(MakeModel(device, PositionExtension::kSelfExtend, kGrouped));
    }
  }
  static void TearDownTestSuite() {
    models_.clear();
    extended_models_.clear();
    grouped_models_.clear();
  }
  static std::unique_ptr<TestModel> MakeModel(const std::string& device,
                                              PositionExtension extension,
                                              const kernels::GroupedPositions& grouped = {}) {
    return std::make_unique<TestModel>(TestWorkerOptions{.folder = kModel,
                                                         .dtype = kernels::DType::kBFloat16,
                                                         .max_model_len = kContext,
                                                         .extension = extension,
                                                         .grouped = grouped,
                                                         .num_threads = 4,
                                                         .device = device,
                                                         .can_round = device == "cpu",
                                                         .edit_weights = {}});
  }
  void SetUp() override {
    if (models_.empty()) GTEST_SKIP() << "no GPU on this machine";
  }

  // Budgets are so small that most of the text is skipped.
  static TestRequest MakeRequest(int64_t begin, int64_t size, uint32_t policy) {
    KVASIR_CHECK(begin + size <= std::ssize(text_));
    TestRequest request = {.prompt = {text_.begin() + begin, text_.begin() + begin + size},
                           .max_tokens = kAnswer,
                           .policy = policy,
                           .prefill = MakeNumbers(32, 128, 256),
                           .decode = MakeNumbers(16, 128, 128, policy == 2 ? 2 : 0),
                           .tail_tokens = 20,
                           .sampling = Greedy(),
                           .cached_blocks = {}};
    if (Prunes(policy)) request.decode.set_top_p(0.9f);
    if (Ends(policy)) request.decode.set_patience(3);
    if (policy == kEndingByImportance) request.decode.set_token_budget(2048);  // many pages
    if (Reuses(policy)) {
      v1::ReusePolicy& reuse = *request.decode.mutable_reuse();
      // infinitehip's stages have intervals 8, 8 and 4.
      reuse.set_interval(policy >= kFirstReusing + 4 ? 8 : 3);
      reuse.set_theta(0.8f);
      reuse.set_theta_force(0.5f);
      reuse.set_max_age(5);
    }
    return request;
  }

  // At most num_slots requests at a time, request r in slot r % num_slots.
  static Run Serve(TestModel& model, const std::vector<TestRequest>& requests,
                   int64_t num_slots = kSlots, const EngineOptions& options = Options()) {
    TestWorker worker(model, options);
    TestCoordinator coordinator({.num_slots = num_slots, .chunk = kChunk});
    for (const TestRequest& request : requests) coordinator.Add(request);
    worker.Run(coordinator);
    Run run = {.logits = worker.logits(), .results = {}, .stats = worker.engine().store().stats()};
    for (size_t r = 0; r < requests.size(); ++r) run.results.push_back(coordinator.result(r));
    return run;
  }

  // Returns, for each token of the answer, the largest difference of the CPU's logits when its
  // attention is rounded differently, as far as the answers are the same.
  static std::vector<float> DifferencesByRounding(TestModel& cpu, const TestRequest& request,
                                                  const EngineOptions& options) {
    const auto serve = [&](uint64_t seed) {
      cpu.rounding().set_seed(seed);
      return Serve(cpu, {request}, /*num_slots=*/1, options);
    };
    const Run exact = serve(0);
    std::vector<float> largest(kAnswer);
    for (uint64_t seed = 1; seed <= kRoundings; ++seed) {
      const Run rounded = serve(seed);
      for (size_t i = 0; i < largest.size(); ++i) {
        const std::pair<int64_t, int64_t> place = {
            0, std::ssize(request.prompt) - 1 + static_cast<int64_t>(i)};
        LogitsDifference difference;
        difference.Add(exact.logits.at(place), rounded.logits.at(place));
        largest[i] = std::max(largest[i], difference.largest);
        if (exact.results[0].tokens[i] != rounded.results[0].tokens[i]) break;
      }
    }
    cpu.rounding().set_seed(0);
    return largest;
  }

  // Compares up to the first token that differs: after it the two read different texts.
  static void ExpectAlike(const std::vector<TestRequest>& requests, int64_t num_slots = kSlots) {
    ExpectAlike(models_, requests, num_slots, kTolerance);
  }
  // Selectors round the queries that they rotate, so their choices differ more often.
  static void ExpectAlikeExtended(const TestRequest& request, float tolerance) {
    ExpectAlike(extended_models_, {request}, kSlots, tolerance);
  }
  static void ExpectAlike(const std::vector<std::unique_ptr<TestModel>>& models,
                          const std::vector<TestRequest>& requests, int64_t num_slots,
                          float tolerance, const EngineOptions& options = Options()) {
    const Run cpu = Serve(*models[0], requests, num_slots, options);
    const Run gpu = Serve(*models[1], requests, num_slots, options);
    int64_t compared = 0;
    for (size_t r = 0; r < requests.size(); ++r) {
      SCOPED_TRACE(testing::Message() << "request " << r);
      ASSERT_TRUE(gpu.results[r].status.ok()) << gpu.results[r].status;
      std::vector<float> by_rounding;
      for (int64_t i = 0; i < kAnswer; ++i) {
        const std::pair<int64_t, int64_t> place = {static_cast<int64_t>(r) % num_slots,
                                                   std::ssize(requests[r].prompt) - 1 + i};
        LogitsDifference difference;
        difference.Add(cpu.logits.at(place), gpu.logits.at(place));
        // A list that differs from the CPU's in one token differs in all steps that it serves.
        const float allowed = difference.scale * tolerance * (Reuses(requests[r].policy) ? 2 : 1);
        if (difference.largest > allowed) {
          if (by_rounding.empty()) {
            by_rounding = DifferencesByRounding(*models[0], requests[r], options);
          }
          const float own = by_rounding[static_cast<size_t>(i)];
          std::cout << "request " << r << ", token " << i << ": " << difference.largest << " where "
                    << allowed << " is allowed; the CPU rounded otherwise " << own << std::endl;
          EXPECT_LE(difference.largest, kBeyondRounding * own) << "token " << i;
        }
        ++compared;
        const size_t at = static_cast<size_t>(i);
        if (cpu.results[r].tokens[at] == gpu.results[r].tokens[at]) continue;
        const float margin = TopTwoMargin(cpu.logits.at(place));
        std::cout << "request " << r << ", token " << i << " differs, top-2 margin " << margin
                  << std::endl;
        EXPECT_LE(margin, 2 * difference.largest) << "token " << i;
        break;
      }
      const auto& found = gpu.results[r].accounting;
      const auto& expected = cpu.results[r].accounting;
      const v1::PhaseAccounting found_pages = BothPhases(found);
      const v1::PhaseAccounting expected_pages = BothPhases(expected);
      EXPECT_GT(found.attended_tokens(), 0u);
      EXPECT_EQ(found_pages.blocks_total(), expected_pages.blocks_total());
      // Attention differs in another text where a threshold decides how much is read, or when.
      const bool same_text = cpu.results[r].tokens == gpu.results[r].tokens;
      if (same_text || !Prunes(requests[r].policy)) {
        // Rows may leave up to three fewer pages unread.
        ExpectClose(found_pages.page_hits() + found_pages.skipped_terminated(),
                    expected_pages.page_hits() + expected_pages.skipped_terminated());
        ExpectClose(found.attended_tokens(), expected.attended_tokens());
      }
      EXPECT_EQ(found_pages.page_misses(), 0u);
      const bool compares_queries = ComparesQueries(requests[r].policy);
      if (same_text || !compares_queries) ExpectSameStages(found, expected, compares_queries);
    }
    // A request that is undecided between two tokens may differ at once; most may not.
    if (requests.size() > 1) {
      EXPECT_GT(compared, 4 * std::ssize(requests)) << "answers differ at once";
    }
  }

  // Which steps select depends on positions alone, unless queries are compared, which differ
  // slightly from the CPU's.
  static void ExpectSameStages(const v1::RowAccounting& found, const v1::RowAccounting& expected,
                               bool compares_queries) {
    if (!compares_queries) {
      EXPECT_THAT(found.stages_run(), testing::ElementsAreArray(expected.stages_run()));
      EXPECT_THAT(found.stages_reused(), testing::ElementsAreArray(expected.stages_reused()));
      return;
    }
    ASSERT_EQ(found.stages_run_size(), expected.stages_run_size());
    for (int s = 0; s < found.stages_run_size(); ++s) {
      const auto steps = static_cast<double>(expected.stages_run(s) + expected.stages_reused(s));
      EXPECT_EQ(found.stages_run(s) + found.stages_reused(s),
                expected.stages_run(s) + expected.stages_reused(s));
      EXPECT_NEAR(static_cast<double>(found.stages_run(s)),
                  static_cast<double>(expected.stages_run(s)), 0.1 * steps);
    }
  }

  static void ExpectClose(uint64_t found, uint64_t expected) {
    EXPECT_NEAR(static_cast<double>(found), static_cast<double>(expected),
                0.05 * static_cast<double>(expected));
  }

  // Results do not depend on where a page lies. Premises: pages were read in place from the host
  // tier, left device memory, and moved there where a step does not need all pages.
  static void ExpectSameBitsFromParts(TestModel& model, const std::vector<uint32_t>& policies,
                                      EngineOptions options) {
    constexpr int64_t kPrompt = 3000;
    const int64_t blocks = 2 * (kPrompt + kAnswer) / kernels::kPageTokens + 2;
    const int64_t block_bytes =
        model.transformer().kv_layout(kernels::DType::kBFloat16).block_bytes();
    for (const uint32_t policy : policies) {
      const std::vector<TestRequest> requests = {MakeRequest(100, kPrompt, policy),
                                                 MakeRequest(900, kPrompt - 70, policy)};
      const auto serve = [&](int64_t device_blocks) {
        options.kv.device = device_blocks * block_bytes;
        return Serve(model, requests, /*num_slots=*/2, options);
      };
      const Run whole = serve(blocks);
      EXPECT_EQ(whole.stats.device_misses, 0);
      EXPECT_EQ(whole.stats.evictions, 0);
      for (const int64_t part : {4, 10}) {
        SCOPED_TRACE(testing::Message() << "policy " << policy << ", one part in " << part);
        const Run parts = serve(blocks / part);
        for (const TestResult& result : parts.results) ASSERT_TRUE(result.status.ok());
        EXPECT_EQ(parts.logits, whole.logits);
        EXPECT_GT(parts.stats.device_misses, 0);
        EXPECT_EQ(parts.stats.promotions > 0, policy != 0);
        EXPECT_GT(parts.stats.evictions, 0);
        EXPECT_EQ(parts.stats.device_hits + parts.stats.device_misses, whole.stats.device_hits);
        std::cout << "policy " << policy << ", " << blocks / part << " of " << blocks
                  << " blocks in device memory: " << parts.stats.device_hits << " hits, "
                  << parts.stats.device_misses << " misses, " << parts.stats.promotions
                  << " promotions, " << parts.stats.evictions << " evictions" << std::endl;
      }
    }
  }

  // What else is in a step changes no bit of a request: others of its policy and of all others,
  // prompts and answers, so that its products are those of one row, of up to 16 and of chunks.
  static void ExpectSameBitsAmongOthers(TestModel& model, const std::vector<uint32_t>& policies,
                                        const EngineOptions& options) {
    constexpr int64_t kPrompt = 900;
    for (const uint32_t policy : policies) {
      SCOPED_TRACE(testing::Message() << "policy " << policy);
      const TestRequest request = MakeRequest(100, kPrompt, policy);
      const Run alone = Serve(model, {request}, kSlots, options);
      ASSERT_TRUE(alone.results[0].status.ok()) << alone.results[0].status;
      const auto expect_same = [&](const std::vector<TestRequest>& requests, const char* how) {
        SCOPED_TRACE(how);
        const Run run = Serve(model, requests, kSlots, options);
        ASSERT_TRUE(run.results[0].status.ok()) << run.results[0].status;
        EXPECT_EQ(run.results[0].tokens, alone.results[0].tokens);
        for (const auto& [place, logits] : alone.logits) {
          ASSERT_TRUE(run.logits.contains(place));
          if (run.logits.at(place) == logits) continue;
          LogitsDifference difference;
          difference.Add(logits, run.logits.at(place));
          ADD_FAILURE() << "logits after position " << place.second << " differ by up to "
                        << difference.largest;
          break;
        }
      };
      expect_same({request}, "again");
      // The others go on when it has ended.
      std::vector<TestRequest> requests = {request};
      const auto add_others = [&](int64_t count) {
        while (std::ssize(requests) <= count) {
          const int64_t i = std::ssize(requests);
          const uint32_t other =
              i % 3 == 0 ? policy : policies[static_cast<size_t>(i) % policies.size()];
          requests.push_back(MakeRequest(300 * i, 150 + 130 * i, other));
          requests.back().max_tokens = 60;
        }
      };
      add_others(3);
      expect_same(requests, "beside 3 others");
      add_others(kSlots - 1);
      expect_same(requests, "beside 15 others");
    }
  }

  static inline std::vector<uint32_t> text_;
  // First on the CPU, then on the GPU.
  static inline std::vector<std::unique_ptr<TestModel>> models_;
  static inline std::vector<std::unique_ptr<TestModel>> extended_models_;
  static inline std::vector<std::unique_ptr<TestModel>> grouped_models_;
};

// The device feeds sampled tokens to the next step; anything that needs the host in between waits
// for it.
TEST_F(CudaEngineTest, StepsThatBeginAheadChangeNoBit) {
  std::vector<TestRequest> requests;
  for (const uint32_t policy : {0u, 1u, 2u, 12u}) {
    requests.push_back(MakeRequest(500 * policy, 700 + 40 * policy, policy));
    requests.back().max_tokens = 70;  // into the next block
    requests.back().sampling.set_temperature(policy == 0 ? 0 : 1);
    requests.back().sampling.set_seed(policy);
  }
  requests[1].sampling.set_logprobs(3);
  struct Served {
    std::vector<TestResult> results;
    std::map<std::pair<int64_t, int64_t>, TestWorker::Logits> logits;
    int64_t fed_steps = 0;
    int64_t rows_in_vain = 0;
  };
  const auto serve = [&](const auto& run) {
    TestWorker worker(*models_[1], Options());
    TestCoordinator coordinator({.num_slots = kSlots, .chunk = kChunk});
    for (const TestRequest& request : requests) coordinator.Add(request);
    (worker.*run)(coordinator);
    Served served = {.results = {},
                     .logits = worker.logits(),
                     .fed_steps = worker.engine().fed_steps(),
                     .rows_in_vain = coordinator.rows_in_vain()};
    for (size_t r = 0; r < requests.size(); ++r) served.results.push_back(coordinator.result(r));
    return served;
  };
  const auto expect_alike = [&] {
    const Served expected = serve(&TestWorker::Run);
    const Served found = serve(&TestWorker::RunAhead);
    EXPECT_EQ(expected.fed_steps, 0);
    for (size_t r = 0; r < requests.size(); ++r) {
      EXPECT_TRUE(found.results[r].status.ok()) << found.results[r].status;
      EXPECT_EQ(found.results[r].tokens, expected.results[r].tokens) << "request " << r;
      EXPECT_EQ(found.results[r].accounting.attended_tokens(),
                expected.results[r].accounting.attended_tokens());
      for (size_t i = 0; i < expected.results[r].logprobs.size(); ++i) {
        EXPECT_EQ(found.results[r].logprobs[i].SerializeAsString(),
                  expected.results[r].logprobs[i].SerializeAsString());
      }
    }
    for (const auto& [place, logits] : expected.logits) {
      EXPECT_EQ(found.logits.at(place), logits) << "position " << place.second;
    }
    return found;
  };
  const Served whole = expect_alike();
  EXPECT_GT(whole.fed_steps, 50);
  // One request ends unforeseen, and the others go on.
  requests[2].last_token = whole.results[2].tokens[20];
  EXPECT_EQ(expect_alike().rows_in_vain, 1);
  // Penalties count tokens on the host.
  requests[3].sampling.set_frequency_penalty(0.5);
  EXPECT_LT(expect_alike().fed_steps, 50);
}

TEST_F(CudaEngineTest, ARequestAloneTwiceAndAmongOthersHasTheSameBits) {
  std::vector<uint32_t> policies(kNumPolicies);
  std::iota(policies.begin(), policies.end(), 0u);
  ExpectSameBitsAmongOthers(*models_[1], policies, Options());
}

TEST_F(CudaEngineTest, AtOtherPositionsARequestAmongOthersHasTheSameBits) {
  ExpectSameBitsAmongOthers(*extended_models_[1], {0, 1, 3, 4, 5}, Options());
  ExpectSameBitsAmongOthers(*grouped_models_[1], {0, 1, 3, 4, 5}, GroupedOptions());
}

TEST_F(CudaEngineTest, EveryPolicyAloneAnswersAsOnTheCpu) {
  for (uint32_t policy = 0; policy < kNumPolicies; ++policy) {
    for (const int64_t size : {1, 63, 64, 65, 700, 4000}) {
      SCOPED_TRACE(testing::Message() << "policy " << policy << ", " << size << " tokens");
      ExpectAlike({MakeRequest(100, size, policy)});
    }
  }
}

// Keys are cached un-rotated, at compact positions. A list that serves several steps enlarges the
// effect of a different choice: with infinitehip by interval the CPU's logits in float32 and in
// bfloat16 differ by 0.23 of the largest one at one token of these.
TEST_F(CudaEngineTest, EveryPolicyAnswersAsOnTheCpuWherePositionsAreExtended) {
  for (uint32_t policy = 0; policy < kNumPolicies; ++policy) {
    for (const int64_t size : {63, 700, 3000}) {
      SCOPED_TRACE(testing::Message() << "policy " << policy << ", " << size << " tokens");
      ExpectAlikeExtended(MakeRequest(100, size, policy), (Reuses(policy) ? 4 : 2) * kTolerance);
    }
  }
}

// Beyond the trained length only compact positions are ones that the model knows. With budgets like
// these the CPU's answers in float32 and bfloat16 differ by 0.14 of the largest logit.
TEST_F(CudaEngineTest, ContextsBeyondTheTrainedWindowAnswerAsOnTheCpu) {
  for (const uint32_t policy : {1u, 3u, 4u, kFirstPruning + 1, kFirstEnding}) {
    SCOPED_TRACE(testing::Message() << "policy " << policy);
    TestRequest request = MakeRequest(0, 8000, policy);
    request.prompt.insert(request.prompt.begin(), text_.begin(), text_.begin() + 2000);
    request.prefill = MakeNumbers(128, 512, 1024);
    request.decode = MakeNumbers(128, 512, 1024);
    if (Prunes(policy)) request.decode.set_top_p(0.95f);
    if (policy >= kFirstEnding) request.decode.set_patience(5);
    ExpectAlikeExtended(request, 4 * kTolerance);
  }
}

// Decode rows, chunks and tails of several policies in one step.
TEST_F(CudaEngineTest, ABatchOfAllPoliciesAnswersAsOnTheCpu) {
  std::vector<TestRequest> requests;
  for (int64_t i = 0; i < 2 * kNumPolicies; ++i) {
    const int64_t size = 200 + 100 * i;
    const int64_t begin = std::min(100 * i, std::ssize(text_) - size);
    requests.push_back(MakeRequest(begin, size, static_cast<uint32_t>(i % kNumPolicies)));
  }
  ExpectAlike(requests);
}

// Premise of the comparison: the sparse policies skip pages and prune, about as many as on the CPU,
// whose keys differ slightly.
TEST_F(CudaEngineTest, SkipsAsManyPagesAsTheCpu) {
  for (uint32_t policy = 1; policy < kNumPolicies; ++policy) {
    SCOPED_TRACE(testing::Message() << "policy " << policy);
    const std::vector<TestRequest> requests = {MakeRequest(0, 4000, policy)};
    const auto expected = Serve(*models_[0], requests).results[0].accounting;
    const auto found = Serve(*models_[1], requests).results[0].accounting;
    const v1::PhaseAccounting found_pages = BothPhases(found);
    const v1::PhaseAccounting expected_pages = BothPhases(expected);
    std::cout << "policy " << policy << ": of " << found_pages.blocks_total() << " pages read "
              << found_pages.page_hits() << ", on the CPU " << expected_pages.page_hits()
              << ", pruned " << found_pages.skipped_pruned() << ", on the CPU "
              << expected_pages.skipped_pruned() << ", tokens attended to "
              << found.attended_tokens() << ", on the CPU " << expected.attended_tokens()
              << ", left unread " << found_pages.skipped_terminated() << ", on the CPU "
              << expected_pages.skipped_terminated() << std::endl;
    EXPECT_EQ(found_pages.blocks_total(), expected_pages.blocks_total());
    EXPECT_EQ(found_pages.skipped_selected_out() + found_pages.skipped_window() > 0,
              policy != kAllEnding);
    EXPECT_EQ(found_pages.skipped_window(), expected_pages.skipped_window());
    ExpectClose(found_pages.page_hits() + found_pages.skipped_terminated(),
                expected_pages.page_hits() + expected_pages.skipped_terminated());
    ExpectClose(found_pages.skipped_selected_out(), expected_pages.skipped_selected_out());
    ExpectClose(found.attended_tokens(), expected.attended_tokens());
    EXPECT_EQ(found_pages.skipped_pruned() > 0, expected_pages.skipped_pruned() > 0);
    EXPECT_EQ(found_pages.skipped_pruned() > 0, Prunes(policy));
    EXPECT_EQ(found.stages_reused_size() > 0, Reuses(policy));
    EXPECT_LE(found_pages.skipped_terminated(), expected_pages.skipped_terminated() * 21 / 20 + 20);
    if (!Ends(policy)) {
      EXPECT_EQ(found_pages.skipped_terminated(), 0u);
    }
    if (policy == kAllEnding) {
      EXPECT_GT(found_pages.skipped_terminated(), 0u);
    }
  }
}

// A shape of step is recorded when it comes for the second time. Answers of several requests, which
// end one by one, are compared with the CPU's above; this checks that their steps were graphs, and
// how many launches they have.
TEST_F(CudaEngineTest, StepsOfOneTokenARowAreGraphs) {
  const auto& backend = static_cast<CudaBackend&>(models_[1]->transformer().backend());
  for (uint32_t policy = 0; policy < kNumPolicies; ++policy) {
    const CudaGraphStats before = backend.graphs().stats();
    // With two pages of a handful an answer may depend on which of two similar ones is the second.
    // In this text none does: the CPU's logits in float32 and in bfloat16 differ by less than half
    // of kTolerance under every policy.
    ExpectAlike({MakeRequest(1200, 700, policy)});
    const CudaGraphStats after = backend.graphs().stats();
    EXPECT_GE(after.replayed - before.replayed, kAnswer - 6) << "policy " << policy;
    std::cout << "policy " << policy << ": a step is " << after.nodes << " nodes, "
              << static_cast<double>(after.nodes) / kLayers << " a layer; recorded "
              << after.recorded - before.recorded << ", replayed "
              << after.replayed - before.replayed << std::endl;
  }
}

// Steps that differ only in the policy are different graphs. In the second round, when no buffer
// grows any more, they differ only in that.
TEST_F(CudaEngineTest, PoliciesThatTakeTurnsAnswerAsOnTheCpu) {
  std::vector<TestRequest> requests;
  for (int64_t i = 0; i < 2 * kNumPolicies; ++i) {
    // Lengths so far apart that no two requests sample at the same position.
    requests.push_back(
        MakeRequest(64 * i, 500 + 2 * kAnswer * i, static_cast<uint32_t>(i % kNumPolicies)));
  }
  ExpectAlike(requests, /*num_slots=*/1);
}

TEST_F(CudaEngineTest, PartsOfTheKvInDeviceMemoryGiveTheSameBits) {
  ExpectSameBitsFromParts(*models_[1], {0, 1, 3, 7}, Options());
}

// Far keys make up most of these contexts, which exceed the trained length.
TEST_F(CudaEngineTest, GroupedPositionsAnswerAsOnTheCpu) {
  const auto& backend = static_cast<CudaBackend&>(grouped_models_[1]->transformer().backend());
  // Several requests in a step, shorter than a neighbourhood and longer, and chunks that lie inside
  // one.
  std::vector<TestRequest> requests;
  for (const uint32_t policy : {0u, 1u, 2u, 3u, 4u, 5u, 12u, 14u, 15u, 17u}) {
    requests.push_back(MakeRequest(64 * policy, 200 + 190 * policy, policy));
    requests.back().prefill.set_window_tokens(200);
  }
  EXPECT_LT(std::ssize(requests.front().prompt) + kAnswer, kGrouped.window) << "a premise";
  EXPECT_GT(std::ssize(requests.back().prompt), 4 * kGrouped.window) << "a premise";
  ExpectAlike(grouped_models_, requests, kSlots, 2 * kTolerance, GroupedOptions());
  const CudaGraphStats before = backend.graphs().stats();
  ExpectAlike(grouped_models_, {MakeRequest(900, 700, 1)}, kSlots, 2 * kTolerance,
              GroupedOptions());
  EXPECT_GE(backend.graphs().stats().replayed - before.replayed, kAnswer - 6);
}

TEST_F(CudaEngineTest, GroupedPositionsBeyondTheTrainedWindowAnswerAsOnTheCpu) {
  // Policies with lists come first: positions that dense attention has asked for stay known.
  for (const uint32_t policy : {1u, 14u, 0u}) {
    SCOPED_TRACE(testing::Message() << "policy " << policy);
    TestRequest request = MakeRequest(0, 8000, policy);
    request.prompt.insert(request.prompt.begin(), text_.begin(), text_.begin() + 2000);
    EXPECT_GT(std::ssize(request.prompt), 8192) << "a premise";
    request.prefill = MakeNumbers(128, 512, 1024);
    request.decode = MakeNumbers(128, 512, 1024);
    if (Reuses(policy)) request.decode.mutable_reuse()->set_interval(4);
    ExpectAlike(grouped_models_, {request}, kSlots, (policy == 0 ? 1 : 4) * kTolerance,
                GroupedOptions());
  }
}

TEST_F(CudaEngineTest, GroupedPositionsGiveTheSameBitsFromPartsInDeviceMemory) {
  ExpectSameBitsFromParts(*grouped_models_[1], {0, 1, 3}, GroupedOptions());
}

// Requests of all kinds in turn, and in steps together.
std::vector<v1::RowSampling> Samplings() {
  std::vector<v1::RowSampling> samplings(6, Greedy());
  samplings[1].set_logprobs(5);
  samplings[2].set_temperature(0.8f);
  samplings[2].set_top_p(0.9f);
  samplings[2].set_seed(7);
  samplings[3] = samplings[2];
  samplings[3].set_logprobs(0);
  samplings[3].set_top_k(40);
  samplings[3].set_repetition_penalty(1.3f);
  samplings[3].set_frequency_penalty(0.2f);
  samplings[3].set_presence_penalty(0.1f);
  samplings[4] = samplings[3];
  samplings[4].set_min_p(0.02f);
  samplings[4].set_logprobs(20);
  samplings[4].set_min_tokens(9);
  for (uint32_t token = 0; token < 64; ++token) {
    samplings[4].add_stop_token_ids(token);
    v1::LogitBias& bias = *samplings[4].add_logit_bias();
    bias.set_token_id(token + 32);
    bias.set_bias(token % 2 == 0 ? 3.0f : -3.0f);
  }
  samplings[5].set_frequency_penalty(1.5f);
  return samplings;
}

// Returns what the CPU's op makes of the logits that the GPU computed.
kernels::SampledToken SampleOnCpu(const Sequence& sequence, int64_t position,
                                  TestWorker::Logits logits, RowSamplingBuffers& buffers) {
  const int64_t vocab = std::ssize(logits);
  const kernels::SamplingOptions options = MakeSamplingOptions(sequence, position, vocab, buffers);
  kernels::SampledToken token;
  kernels::SerialExecutor executor;
  const kernels::HostBuffer scratch =
      kernels::HostBuffer::Allocate(kernels::SamplingScratchBytes(vocab, 1)).value();
  EXPECT_TRUE(
      kernels::Sample(
          {.logits = kernels::TensorView(logits.data(), kernels::DType::kFloat32, {1, vocab}),
           .options = {&options, 1},
           .tokens = {&token, 1},
           .scratch = {scratch.data(), static_cast<size_t>(scratch.size_bytes())}},
          executor)
          .ok());
  return token;
}

// Sampled on the device, within the step's graph; the same tokens as where nobody reads the logits.
TEST_F(CudaEngineTest, TokensAndLogprobsAreThoseThatTheCpuSamplesFromTheSameLogits) {
  std::vector<TestRequest> requests;
  const std::vector<v1::RowSampling> samplings = Samplings();
  for (size_t r = 0; r < 2 * samplings.size(); ++r) {
    requests.push_back(MakeRequest(100 + 30 * static_cast<int64_t>(r), 300, 0));
    requests.back().sampling = samplings[r % samplings.size()];
  }
  const Run run = Serve(*models_[1], requests);
  std::set<uint32_t> drawn;
  for (size_t r = 0; r < requests.size(); ++r) {
    Sequence sequence;
    sequence.sampling = requests[r].sampling;
    sequence.prompt_size = std::ssize(requests[r].prompt);
    sequence.tokens.assign(requests[r].prompt.begin(), requests[r].prompt.end());
    const TestResult& result = run.results[r];
    ASSERT_TRUE(result.status.ok()) << result.status;
    for (size_t i = 0; i < result.tokens.size(); ++i) {
      SCOPED_TRACE(testing::Message() << "request " << r << ", token " << i);
      RowSamplingBuffers buffers;
      const int64_t position = std::ssize(sequence.tokens);
      const kernels::SampledToken token = SampleOnCpu(
          sequence, position, run.logits.at({static_cast<int64_t>(r), position - 1}), buffers);
      EXPECT_EQ(result.tokens[i], static_cast<uint32_t>(token.token));
      if (sequence.sampling.has_logprobs()) {
        EXPECT_EQ(result.logprobs[i].SerializeAsString(),
                  Logprobs(token, buffers).SerializeAsString());
      }
      sequence.tokens.push_back(static_cast<int32_t>(result.tokens[i]));
      drawn.insert(result.tokens[i]);
    }
  }
  EXPECT_GT(drawn.size(), 30u) << "premise: answers differ";
  EXPECT_EQ(run.results[4].logprobs.size(), static_cast<size_t>(kAnswer));

  TestWorker untapped(*models_[1], Options());
  untapped.engine().set_logits_tap(nullptr);
  TestCoordinator coordinator({.num_slots = kSlots, .chunk = kChunk});
  for (const TestRequest& request : requests) coordinator.Add(request);
  untapped.Run(coordinator);
  for (size_t r = 0; r < requests.size(); ++r) {
    EXPECT_EQ(coordinator.result(r).tokens, run.results[r].tokens) << "request " << r;
  }
}

// Kernels have no sums of undefined order; the products of linear layers are chosen by shape.
TEST_F(CudaEngineTest, TheSameStepsGiveTheSameBits) {
  const TestRequest request = MakeRequest(500, 1500, 1);
  const Run alone = Serve(*models_[1], {request});
  const Run again = Serve(*models_[1], {request});
  EXPECT_EQ(alone.results[0].tokens, again.results[0].tokens);
  EXPECT_EQ(alone.logits, again.logits);
}

}  // namespace
}  // namespace kvasir::worker
