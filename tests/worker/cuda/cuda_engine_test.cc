// The engine on a GPU against the engine on the CPU: the same requests over a reference model, the
// logits that tokens are sampled from, the tokens, and the attended pages. Where a selection
// depends on a near tie, the GPU may decide it differently: then the CPU's own logits must move as
// far when its attention is rounded differently.
#include <algorithm>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <iostream>
#include <utility>
#include <vector>

#include "tests/worker/cuda/cuda_engine_fixture.h"
#include "worker/backend/cuda/cuda_backend.h"

namespace kvasir::worker {
namespace {

// How far the GPU's logits may be from the CPU's, as shares of the largest logit. Beyond a bound
// the difference must be one that the CPU has itself when its attention is rounded otherwise
// (kBeyondRounding): a bound says from where on that is asked. Every comparison prints its greatest
// difference.
struct Tolerances {
  float one_step = 0;  // of policies without lists, or whose lists serve one step
  float reusing = 0;   // of policies whose lists serve several
};
// Sums of bfloat16 products in another order, through six layers. A list that differs from the
// CPU's in one token differs in all steps that it serves: by a near tie of hip by interval the CPU
// itself moves by 0.074 to 0.144 (docs/measurements/2026-11-24.md).
constexpr Tolerances kUsual = {.one_step = 0.05f, .reusing = 0.1f};
// Keys are un-rotated, and selectors round the queries that they rotate, so choices differ more
// often. With infinitehip by interval the CPU's logits in float32 and in bfloat16 differ by 0.23 at
// one token.
constexpr Tolerances kExtended = {.one_step = 0.1f, .reusing = 0.25f};
// Keys are un-rotated here, too. There are no figures of the CPU.
constexpr Tolerances kAtGroupedPositions = {.one_step = 0.1f, .reusing = 0.2f};
// With small budgets beyond the trained window the CPU's answers in float32 and bfloat16 differ by
// 0.14, and under infinitehip by 0.35 where its attention is rounded otherwise. There are no
// figures of lists that serve several steps.
constexpr Tolerances kBeyondTheWindow = {.one_step = 0.2f, .reusing = 0.4f};
// A code of fp8 is up to 1/8 larger than the one before it.
constexpr Tolerances kQuantized = {.one_step = 0.1f, .reusing = 0.2f};
constexpr int64_t kLayers = 6;  // of the model
// How often the CPU rounds differently, and how far the GPU's differences may exceed the CPU's own.
constexpr uint64_t kRoundings = 8;
constexpr float kBeyondRounding = 1.5f;

// How requests are served and compared.
struct Comparison {
  int64_t num_slots = kSlots;
  Tolerances tolerances = kUsual;
  EngineOptions options = Options();
};

std::pair<int64_t, int64_t> PlaceOf(const TestRequest& request, int64_t slot, int64_t token) {
  return {slot, std::ssize(request.prompt) - 1 + token};
}

// Returns, for each token of the answer, the largest difference of the CPU's logits when its
// attention is rounded differently, as far as the answers are the same.
std::vector<float> DifferencesByRounding(TestModel& cpu, const TestRequest& request,
                                         const EngineOptions& options) {
  const auto serve = [&](uint64_t seed) {
    cpu.rounding().set_seed(seed);
    return Serve(cpu, {request}, /*num_slots=*/1, options);
  };
  const ServedRun exact = serve(0);
  std::vector<float> largest(kAnswer);
  for (uint64_t seed = 1; seed <= kRoundings; ++seed) {
    const ServedRun rounded = serve(seed);
    for (size_t i = 0; i < largest.size(); ++i) {
      const auto place = PlaceOf(request, 0, static_cast<int64_t>(i));
      LogitsDifference difference;
      difference.Add(exact.logits.at(place), rounded.logits.at(place));
      largest[i] = std::max(largest[i], difference.largest);
      if (exact.results[0].tokens[i] != rounded.results[0].tokens[i]) break;
    }
  }
  cpu.rounding().set_seed(0);
  return largest;
}

// Which steps select depends on positions alone, unless queries are compared, which differ
// slightly from the CPU's.
void ExpectSameStages(const v1::RowAccounting& found, const v1::RowAccounting& expected,
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

void ExpectClose(uint64_t found, uint64_t expected) {
  EXPECT_NEAR(static_cast<double>(found), static_cast<double>(expected),
              0.05 * static_cast<double>(expected));
}

// Compares the logits of one request's answer, and its tokens up to the first that differs: after
// it the two read different texts. Returns how many tokens were compared.
int64_t ExpectAlikeAnswers(TestModel& cpu_model, const TestRequest& request, size_t r,
                           const ServedRun& cpu, const ServedRun& gpu, const Comparison& how) {
  const float tolerance = Reuses(request.policy) ? how.tolerances.reusing : how.tolerances.one_step;
  std::vector<float> by_rounding;
  float greatest = 0;
  int64_t compared = 0;
  for (bool same = true; same && compared < kAnswer; ++compared) {
    const int64_t i = compared;
    const auto place = PlaceOf(request, static_cast<int64_t>(r) % how.num_slots, i);
    LogitsDifference difference;
    difference.Add(cpu.logits.at(place), gpu.logits.at(place));
    greatest = std::max(greatest, difference.largest / difference.scale);
    const float allowed = difference.scale * tolerance;
    if (difference.largest > allowed) {
      if (by_rounding.empty()) by_rounding = DifferencesByRounding(cpu_model, request, how.options);
      const float own = by_rounding[static_cast<size_t>(i)];
      std::cout << "request " << r << ", token " << i << ": " << difference.largest << " where "
                << allowed << " is allowed; the CPU rounded otherwise " << own << std::endl;
      EXPECT_LE(difference.largest, kBeyondRounding * own) << "token " << i;
    }
    const auto at = static_cast<size_t>(i);
    same = cpu.results[r].tokens[at] == gpu.results[r].tokens[at];
    if (same) continue;
    const float margin = TopTwoMargin(cpu.logits.at(place));
    std::cout << "request " << r << ", token " << i << " differs, top-2 margin " << margin
              << std::endl;
    EXPECT_LE(margin, 2 * difference.largest) << "token " << i;
  }
  std::cout << "policy " << request.policy << ": greatest difference " << greatest
            << " of the largest logit, " << tolerance << " without question" << std::endl;
  return compared;
}

// Compares what one request attended to, and which stages ran.
void ExpectAlikeAccounting(const TestRequest& request, const TestResult& cpu,
                           const TestResult& gpu) {
  const v1::PhaseAccounting found_pages = BothPhases(gpu.accounting);
  const v1::PhaseAccounting expected_pages = BothPhases(cpu.accounting);
  EXPECT_GT(gpu.accounting.attended_tokens(), 0u);
  EXPECT_EQ(found_pages.blocks_total(), expected_pages.blocks_total());
  // Attention differs in another text where a threshold decides how much is read, or when.
  const bool same_text = cpu.tokens == gpu.tokens;
  if (same_text || !Prunes(request.policy)) {
    // Rows may leave up to three fewer pages unread.
    ExpectClose(found_pages.page_hits() + found_pages.skipped_terminated(),
                expected_pages.page_hits() + expected_pages.skipped_terminated());
    ExpectClose(gpu.accounting.attended_tokens(), cpu.accounting.attended_tokens());
  }
  EXPECT_EQ(found_pages.page_misses(), 0u);
  const bool compares_queries = ComparesQueries(request.policy);
  if (same_text || !compares_queries) {
    ExpectSameStages(gpu.accounting, cpu.accounting, compares_queries);
  }
}

void ExpectAlike(const ModelPair& models, const std::vector<TestRequest>& requests,
                 const Comparison& how = {}) {
  const ServedRun cpu = Serve(*models.cpu, requests, how.num_slots, how.options);
  const ServedRun gpu = Serve(*models.gpu, requests, how.num_slots, how.options);
  int64_t compared = 0;
  for (size_t r = 0; r < requests.size(); ++r) {
    SCOPED_TRACE(testing::Message() << "request " << r);
    ASSERT_TRUE(gpu.results[r].status.ok()) << gpu.results[r].status;
    compared += ExpectAlikeAnswers(*models.cpu, requests[r], r, cpu, gpu, how);
    ExpectAlikeAccounting(requests[r], cpu.results[r], gpu.results[r]);
  }
  // A request that is undecided between two tokens may differ at once; most may not.
  if (requests.size() > 1) {
    EXPECT_GT(compared, 4 * std::ssize(requests)) << "answers differ at once";
  }
}

TEST_F(CudaEngineTest, EveryPolicyAloneAnswersAsOnTheCpu) {
  for (uint32_t policy = 0; policy < kNumPolicies; ++policy) {
    for (const int64_t size : {1, 63, 64, 65, 700, 4000}) {
      SCOPED_TRACE(testing::Message() << "policy " << policy << ", " << size << " tokens");
      ExpectAlike(models_, {MakeRequest(100, size, policy)});
    }
  }
}

// Keys are cached un-rotated, at compact positions.
TEST_F(CudaEngineTest, EveryPolicyAnswersAsOnTheCpuWherePositionsAreExtended) {
  for (uint32_t policy = 0; policy < kNumPolicies; ++policy) {
    for (const int64_t size : {63, 700, 3000}) {
      SCOPED_TRACE(testing::Message() << "policy " << policy << ", " << size << " tokens");
      ExpectAlike(extended_models_, {MakeRequest(100, size, policy)}, {.tolerances = kExtended});
    }
  }
}

// Beyond the trained length only compact positions are ones that the model knows.
TEST_F(CudaEngineTest, ContextsBeyondTheTrainedWindowAnswerAsOnTheCpu) {
  for (const uint32_t policy : {1u, 3u, 4u, kFirstPruning + 1, kFirstEnding}) {
    SCOPED_TRACE(testing::Message() << "policy " << policy);
    TestRequest request = MakeRequest(0, 8000, policy);
    request.prompt.insert(request.prompt.begin(), Text().begin(), Text().begin() + 2000);
    request.prefill = MakeNumbers(128, 512, 1024);
    request.decode = MakeNumbers(128, 512, 1024);
    if (Prunes(policy)) request.decode.set_top_p(0.95f);
    if (policy >= kFirstEnding) request.decode.set_patience(5);
    ExpectAlike(extended_models_, {request}, {.tolerances = kBeyondTheWindow});
  }
}

// Decode rows, chunks and tails of several policies in one step.
TEST_F(CudaEngineTest, ABatchOfAllPoliciesAnswersAsOnTheCpu) {
  std::vector<TestRequest> requests;
  for (int64_t i = 0; i < 2 * kNumPolicies; ++i) {
    const int64_t size = 200 + 100 * i;
    const int64_t begin = std::min(100 * i, std::ssize(Text()) - size);
    requests.push_back(MakeRequest(begin, size, static_cast<uint32_t>(i % kNumPolicies)));
  }
  ExpectAlike(models_, requests);
}

// Both sides decode the same codes where the same keys were written; a key that differs in its last
// bit may get the next code.
TEST_F(CudaEngineTest, EveryPolicyAnswersOverQuantizedKvAsOnTheCpu) {
  for (const kernels::DType dtype : {kernels::DType::kFloat8E4M3, kernels::DType::kInt8}) {
    for (const auto& [models, tolerances] :
         {std::pair(&models_, kQuantized), std::pair(&extended_models_, kExtended)}) {
      Comparison how = {.tolerances = tolerances};
      how.options.kv_dtype = dtype;
      for (uint32_t policy = 0; policy < kNumPolicies; ++policy) {
        SCOPED_TRACE(testing::Message() << DTypeName(dtype) << ", policy " << policy);
        ExpectAlike(*models, {MakeRequest(100, 3000, policy)}, how);
      }
    }
  }
}

// Serves a text whose answer has the same tokens on the CPU and the GPU, or the last that was
// tried: in another text, other pages are read.
std::pair<TestResult, TestResult> ServeATextWithOneAnswer(const ModelPair& models,
                                                          uint32_t policy) {
  std::pair<TestResult, TestResult> results;
  for (int64_t begin = 0; begin < 4 * kernels::kPageTokens; begin += kernels::kPageTokens) {
    const std::vector<TestRequest> requests = {MakeRequest(begin, 4000, policy)};
    results = {Serve(*models.cpu, requests).results[0], Serve(*models.gpu, requests).results[0]};
    if (results.first.tokens == results.second.tokens) break;
  }
  return results;
}

// Premise of the comparison: the sparse policies skip pages and prune, about as many as on the CPU,
// whose keys differ slightly.
TEST_F(CudaEngineTest, SkipsAsManyPagesAsTheCpu) {
  for (uint32_t policy = 1; policy < kNumPolicies; ++policy) {
    SCOPED_TRACE(testing::Message() << "policy " << policy);
    const auto [on_cpu, on_gpu] = ServeATextWithOneAnswer(models_, policy);
    ASSERT_EQ(on_cpu.tokens, on_gpu.tokens) << "no text has the same answer";
    const v1::RowAccounting& expected = on_cpu.accounting;
    const v1::RowAccounting& found = on_gpu.accounting;
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
  const auto& backend = static_cast<CudaBackend&>(models_.gpu->transformer().backend());
  for (uint32_t policy = 0; policy < kNumPolicies; ++policy) {
    const CudaGraphStats before = backend.graphs().stats();
    // With two pages of a handful an answer may depend on which of two similar ones is the second.
    // In this text none does: the CPU's logits in float32 and in bfloat16 differ by less than half
    // of kUsual under every policy.
    ExpectAlike(models_, {MakeRequest(1200, 700, policy)});
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
  ExpectAlike(models_, requests, {.num_slots = 1});
}

// Windows of the model in some layers, and policies in the others: alone, and all in one step.
TEST_F(CudaEngineTest, LayersWithWindowsAnswerAsOnTheCpu) {
  std::vector<TestRequest> all;
  for (uint32_t policy = 0; policy < kNumPolicies; ++policy) {
    SCOPED_TRACE(testing::Message() << "policy " << policy);
    ExpectAlike(windowed_models_, {MakeRequest(100, 1500, policy)});
    all.push_back(MakeRequest(64 * policy, 60 + 110 * policy, policy));
  }
  ExpectAlike(windowed_models_, all);
  const auto accounting = [](const ModelPair& models) {
    return BothPhases(Serve(*models.gpu, {MakeRequest(100, 1500, 0)}).results[0].accounting);
  };
  EXPECT_LT(accounting(windowed_models_).blocks_total(),
            accounting(models_).blocks_total() * 3 / 4);
  EXPECT_EQ(accounting(windowed_models_).skipped_window(), 0u);
}

// Far keys make up most of these contexts, which exceed the trained length.
TEST_F(CudaEngineTest, GroupedPositionsAnswerAsOnTheCpu) {
  const auto& backend = static_cast<CudaBackend&>(grouped_models_.gpu->transformer().backend());
  // Several requests in a step, shorter than a neighbourhood and longer, and chunks that lie inside
  // one.
  std::vector<TestRequest> requests;
  for (const uint32_t policy : {0u, 1u, 2u, 3u, 4u, 5u, 12u, 14u, 15u, 17u}) {
    requests.push_back(MakeRequest(64 * policy, 200 + 190 * policy, policy));
    requests.back().prefill.set_window_tokens(200);
  }
  EXPECT_LT(std::ssize(requests.front().prompt) + kAnswer, kGrouped.window) << "a premise";
  EXPECT_GT(std::ssize(requests.back().prompt), 4 * kGrouped.window) << "a premise";
  ExpectAlike(grouped_models_, requests,
              {.tolerances = kAtGroupedPositions, .options = GroupedOptions()});
  const CudaGraphStats before = backend.graphs().stats();
  ExpectAlike(grouped_models_, {MakeRequest(900, 700, 1)},
              {.tolerances = kAtGroupedPositions, .options = GroupedOptions()});
  EXPECT_GE(backend.graphs().stats().replayed - before.replayed, kAnswer - 6);
}

TEST_F(CudaEngineTest, GroupedPositionsBeyondTheTrainedWindowAnswerAsOnTheCpu) {
  // Policies with lists come first: positions that dense attention has asked for stay known.
  for (const uint32_t policy : {1u, 14u, 0u}) {
    SCOPED_TRACE(testing::Message() << "policy " << policy);
    TestRequest request = MakeRequest(0, 8000, policy);
    request.prompt.insert(request.prompt.begin(), Text().begin(), Text().begin() + 2000);
    EXPECT_GT(std::ssize(request.prompt), 8192) << "a premise";
    request.prefill = MakeNumbers(128, 512, 1024);
    request.decode = MakeNumbers(128, 512, 1024);
    if (Reuses(policy)) request.decode.mutable_reuse()->set_interval(4);
    ExpectAlike(
        grouped_models_, {request},
        {.tolerances = policy == 0 ? kUsual : kBeyondTheWindow, .options = GroupedOptions()});
  }
}

}  // namespace
}  // namespace kvasir::worker
