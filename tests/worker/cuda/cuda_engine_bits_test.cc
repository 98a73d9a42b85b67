// Answers of the engine on a GPU have the same bits again, beside others, in steps that begin
// ahead, and wherever pages lie.
#include <gtest/gtest.h>
#include <iostream>
#include <map>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/strings/match.h"

#include "kernels/plans/plan_log.h"
#include "tests/worker/cuda/cuda_engine_fixture.h"

namespace kvasir::worker {
namespace {

// Results do not depend on where a page lies. Premises: pages were read in place from the host
// tier, left device memory, and moved there where a step does not need all pages.
void ExpectSameBitsFromParts(TestModel& model, const std::vector<uint32_t>& policies,
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
    const ServedRun whole = serve(blocks);
    EXPECT_EQ(whole.stats.device_misses, 0);
    EXPECT_EQ(whole.stats.evictions, 0);
    for (const int64_t part : {4, 10}) {
      SCOPED_TRACE(testing::Message() << "policy " << policy << ", one part in " << part);
      const ServedRun parts = serve(blocks / part);
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

// Others in a step change no bit of a request, of its policy and of all others, prompts and
// answers, so that its products are those of one row, of up to 16 and of chunks.
void ExpectSameBitsAmongOthers(TestModel& model, const std::vector<uint32_t>& policies,
                               const EngineOptions& options) {
  constexpr int64_t kPrompt = 900;
  for (const uint32_t policy : policies) {
    SCOPED_TRACE(testing::Message() << "policy " << policy);
    const TestRequest request = MakeRequest(100, kPrompt, policy);
    const ServedRun alone = Serve(model, {request}, kSlots, options);
    ASSERT_TRUE(alone.results[0].status.ok()) << alone.results[0].status;
    const auto expect_same = [&](const std::vector<TestRequest>& requests, const char* how) {
      SCOPED_TRACE(how);
      const ServedRun run = Serve(model, requests, kSlots, options);
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
    TestWorker worker(*models_.gpu, Options());
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
  ExpectSameBitsAmongOthers(*models_.gpu, policies, Options());
}

TEST_F(CudaEngineTest, AtOtherPositionsARequestAmongOthersHasTheSameBits) {
  ExpectSameBitsAmongOthers(*extended_models_.gpu, {0, 1, 3, 4, 5}, Options());
  ExpectSameBitsAmongOthers(*grouped_models_.gpu, {0, 1, 3, 4, 5}, GroupedOptions());
}

TEST_F(CudaEngineTest, PartsOfTheKvInDeviceMemoryGiveTheSameBits) {
  ExpectSameBitsFromParts(*models_.gpu, {0, 1, 3, 7}, Options());
}

TEST_F(CudaEngineTest, GroupedPositionsGiveTheSameBitsFromPartsInDeviceMemory) {
  ExpectSameBitsFromParts(*grouped_models_.gpu, {0, 1, 3}, GroupedOptions());
}

// Reads a prompt of 3,000 tokens in chunks, whole or after the blocks of a document that another
// request left, and answers.
ServedRun ServeInChunks(TestModel& model, uint32_t policy, int64_t chunk, bool cached,
                        EngineOptions options = Options()) {
  constexpr int64_t kDocument = 2000;
  TestRequest request = MakeRequest(100, 3000, policy);
  options.max_num_batched_tokens = 8192;
  TestWorker worker(model, options);
  TestCoordinator coordinator({.chunk = chunk, .max_tokens = 8192, .keep_blocks = true});
  if (cached) {
    // The tokens that the first request reads one by one lie after the document.
    TestRequest first = MakeRequest(100, kDocument, policy);
    first.prompt.insert(first.prompt.end(), 60, 5);
    const size_t r = coordinator.Add(first);
    worker.Run(coordinator);
    request.cached_blocks = coordinator.result(r).blocks;
    request.cached_blocks.resize(kDocument / kernels::kPageTokens);
  }
  const size_t r = coordinator.Add(request);
  worker.Run(coordinator);
  EXPECT_TRUE(coordinator.result(r).status.ok()) << coordinator.result(r).status;
  const v1::RowAccounting& accounting = coordinator.result(r).accounting;
  EXPECT_EQ(accounting.cached_device_tokens() > 0, cached);
  const v1::PhaseAccounting pages = BothPhases(accounting);
  EXPECT_EQ(pages.skipped_selected_out() + pages.skipped_window() > 0, policy != 0);
  return {.logits = worker.logits(),
          .results = {coordinator.result(r)},
          .stats = worker.engine().store().stats()};
}

// Chunks of 2,979 tokens leave one for the last chunk.
void ExpectSameBitsInChunks(TestModel& model, uint32_t policy, const std::vector<int64_t>& chunks) {
  const ServedRun expected = ServeInChunks(model, policy, kChunk, /*cached=*/false);
  for (const int64_t chunk : chunks) {
    for (const bool cached : {false, true}) {
      SCOPED_TRACE(testing::Message() << "policy " << policy << ", chunks of " << chunk
                                      << (cached ? ", after a hit" : ""));
      const ServedRun found = ServeInChunks(model, policy, chunk, cached);
      EXPECT_EQ(found.results[0].tokens, expected.results[0].tokens);
      LogitsDifference difference;
      for (const auto& [place, logits] : expected.logits) {
        ASSERT_TRUE(found.logits.contains(place)) << "position " << place.second;
        difference.Add(logits, found.logits.at(place));
      }
      EXPECT_EQ(difference.largest, 0) << "of " << difference.scale;
    }
  }
}

TEST_F(CudaEngineTest, ADensePromptHasTheSameBitsInAnyChunksAndAfterAHit) {
  for (const uint32_t policy : {0u, 2u}) {
    ExpectSameBitsInChunks(*models_.gpu, policy, {64, 100, 331, kChunk, 2979, 4096});
  }
}

// Each block of a page's queries has its own selection.
TEST_F(CudaEngineTest, ASparsePromptHasTheSameBitsInChunksOfPagesAndAfterAHit) {
  for (const uint32_t policy : {1u, 3u, 4u, 5u, 7u, 14u}) {
    ExpectSameBitsInChunks(*models_.gpu, policy, {64, kChunk, 1024, 4096});
  }
}

// Whether a plan was told that names prepared pages.
bool is_prepared = false;

// A page that many tiles read is decoded and rotated once for all of them. In chunks of 256 tokens
// each tile does it for itself.
TEST_F(CudaEngineTest, APromptOverPreparedPagesHasTheSameBits) {
  int64_t chunk = 2979;  // another one each time: a plan is told once
  for (const kernels::DType dtype :
       {kernels::DType::kBFloat16, kernels::DType::kFloat8E4M3, kernels::DType::kInt8}) {
    for (TestModel* const model : {models_.gpu.get(), extended_models_.gpu.get()}) {
      const bool rotated = model == models_.gpu.get();
      SCOPED_TRACE(testing::Message() << DTypeName(dtype) << (rotated ? "" : ", un-rotated"));
      EngineOptions options = Options();
      options.kv_dtype = dtype;
      kernels::SetPlanSink([](absl::string_view, absl::string_view plan) {
        is_prepared |= absl::StrContains(plan, "over prepared pages");
      });
      is_prepared = false;
      const ServedRun expected = ServeInChunks(*model, 0, kChunk, /*cached=*/false, options);
      EXPECT_FALSE(is_prepared);
      for (const bool cached : {false, true}) {
        const ServedRun found = ServeInChunks(*model, 0, chunk, cached, options);
        EXPECT_EQ(found.results[0].tokens, expected.results[0].tokens);
        for (const auto& [place, logits] : expected.logits) {
          EXPECT_TRUE(found.logits.at(place) == logits) << "position " << place.second;
        }
      }
      kernels::SetPlanSink(nullptr);
      EXPECT_EQ(is_prepared, !rotated || dtype != kernels::DType::kBFloat16);
      chunk -= kernels::kPageTokens;
    }
  }
}

// Kernels have no sums of undefined order; the products of linear layers are chosen by shape.
TEST_F(CudaEngineTest, TheSameStepsGiveTheSameBits) {
  const TestRequest request = MakeRequest(500, 1500, 1);
  const ServedRun alone = Serve(*models_.gpu, {request});
  const ServedRun again = Serve(*models_.gpu, {request});
  EXPECT_EQ(alone.results[0].tokens, again.results[0].tokens);
  EXPECT_EQ(alone.logits, again.logits);
}

}  // namespace
}  // namespace kvasir::worker
