#include "worker/engine.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "kernels/sparse/methods.h"
#include "tests/worker/random_model_fixture.h"
#include "tests/worker/test_coordinator.h"
#include "tests/worker/test_worker.h"

namespace kvasir::worker {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr uint32_t kAll = 0, kStreaming = 1, kQuest = 2, kAllThenQuest = 3, kTokenSelect = 4,
                   kHip = 5, kInfiniteHip = 6, kPruned = 7, kHipByInterval = 8,
                   kTokenSelectByCosine = 9, kInfiniteHipByBoth = 10,
                   kTerminated = 13;  // policies

std::vector<uint32_t> RandomPrompt(int64_t size, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<uint32_t> prompt(static_cast<size_t>(size));
  for (uint32_t& token : prompt) token = static_cast<uint32_t>(random() % 101);
  return prompt;
}

TestRequest MakeRequest(int64_t prompt_size, uint32_t policy, uint32_t seed = 7) {
  return MakeSparseRequest(RandomPrompt(prompt_size, seed), policy);
}

using AllLogits = std::map<std::pair<int64_t, int64_t>, TestWorker::Logits>;

// Bit by bit: -0 is not 0, and NaN equals itself.
void ExpectSameBits(const AllLogits& expected, const AllLogits& actual) {
  ASSERT_EQ(expected.size(), actual.size());
  for (const auto& [place, logits] : expected) {
    const auto found = actual.find(place);
    ASSERT_NE(found, actual.end()) << "no logits at position " << place.second;
    ASSERT_EQ(std::memcmp(logits.data(), found->second.data(), logits.size() * sizeof(float)), 0)
        << "slot " << place.first << ", position " << place.second;
  }
}

class EngineTest : public RandomModelFixture {
 protected:
  // Returns the logits of one request in an engine of its own.
  static AllLogits RunAlone(const TestRequest& request, int64_t chunk = 128,
                            const EngineOptions& options = TestWorker::DefaultOptions()) {
    TestWorker worker(*model_, options);
    TestCoordinator coordinator({.chunk = chunk});
    coordinator.Add(request);
    worker.Run(coordinator);
    return worker.logits();
  }
};

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

TEST_F(EngineTest, KeepingAllMassIsTheSelectorAlone) {
  TestRequest request = MakeRequest(500, kPruned);
  const AllLogits pruned = RunAlone(request);
  request.decode.set_top_p(1);
  const AllLogits whole = RunAlone(request);
  EXPECT_NE(pruned, whole);
  request.policy = kAllThenQuest;
  ExpectSameBits(RunAlone(request), whole);
}

TEST_F(EngineTest, ReuseThatNeverServesIsTheSelectorAlone) {
  EngineOptions options = TestWorker::DefaultOptions();
  options.policies[1] = MakePolicy("all", "hip");
  options.policies[2] = MakePolicy("all", "tokenselect");
  for (const auto& [policy, alone] :
       {std::pair(kHipByInterval, 1u), std::pair(kTokenSelectByCosine, 2u)}) {
    TestRequest request = MakeRequest(500, policy);
    const AllLogits reused = RunAlone(request);
    request.decode.mutable_reuse()->set_interval(1);
    request.decode.mutable_reuse()->set_theta(1);
    const AllLogits never = RunAlone(request);
    EXPECT_NE(reused, never);
    request.policy = alone;
    ExpectSameBits(RunAlone(request, 128, options), never);
  }
}

TEST_F(EngineTest, StagesThatRunAndStagesThatServeAreCounted) {
  TestWorker worker(*model_);
  TestCoordinator coordinator({.chunk = 128});
  TestRequest request = MakeRequest(500, kHipByInterval);
  request.decode.mutable_reuse()->set_interval(5);
  request.max_tokens = 20;
  const size_t r = coordinator.Add(request);
  while (coordinator.result(r).tokens.size() < 2) {
    EXPECT_EQ(worker.engine().selection_memory_bytes(), 0) << "before there is an answer";
    const v1::StepPlan plan = coordinator.NextPlan();
    const auto reply = worker.engine().Step(plan);
    ASSERT_TRUE(reply.ok()) << reply.status();
    coordinator.Apply(plan, *reply);
  }
  EXPECT_GT(worker.engine().selection_memory_bytes(), 0);
  worker.Run(coordinator);
  const v1::RowAccounting& a = coordinator.result(r).accounting;
  // The stage runs at these of positions 500 to 518: 500, 505, 510, 512 (a multiple of 64), 517.
  const uint64_t rows = static_cast<uint64_t>(worker.engine().pages_per_block());
  EXPECT_THAT(a.stages_run(), ElementsAre(5 * rows, 0, 0));
  EXPECT_THAT(a.stages_reused(), ElementsAre(14 * rows, 0, 0));
  const auto reply = worker.engine().Step(coordinator.NextPlan());  // frees the slot
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(worker.engine().selection_memory_bytes(), 0);
}

TEST_F(EngineTest, AnUnknownReuseRuleListsTheKnownOnes) {
  EngineOptions options = TestWorker::DefaultOptions();
  options.policies[1] = MakeReusingPolicy("hip", "often");
  SingleCollective single;
  EXPECT_THAT(
      std::string(Engine::Create(options, model_->transformer(), single).status().message()),
      HasSubstr("the reuse rules are interval, cosine, both"));
}

// A decode part with a terminator after any selector, and a pruner.
v1::AttentionPolicy Terminating(const std::string& selector, float top_p) {
  v1::AttentionPolicy decode = MakeTerminatingPolicy(selector, "recency").decode();
  if (selector == "infinitehip") decode.mutable_infinitehip()->set_preset("5k");
  decode.set_top_p(top_p);
  return decode;
}

TEST_F(EngineTest, EverySelectorAndPrunerMayBeTerminated) {
  for (const kernels::SelectorMethod& method : kernels::SelectorMethods()) {
    const std::string name(method.name.data(), method.name.size());
    if (name == "streaming") continue;  // nothing between sink and window
    for (const float top_p : {0.0f, 0.9f}) {
      if (name == "all" && top_p > 0) continue;
      SCOPED_TRACE(name + (top_p > 0 ? " and top_p" : ""));
      EngineOptions options = TestWorker::DefaultOptions();
      v1::SetSelector("all", *options.policies[1].mutable_prefill());
      *options.policies[1].mutable_decode() = Terminating(name, top_p);
      options.mass_sample_rate = 1;
      TestRequest request = MakeRequest(900, 1);
      request.decode = MakeNumbers(16, 130, 700);
      request.decode.set_top_p(top_p);
      v1::AttentionPolicy& numbers = request.decode;
      v1::SetSelector(name, numbers);
      const auto run = [&](uint32_t patience, AllLogits& logits) {
        numbers.set_patience(patience);
        TestWorker worker(*model_, options);
        TestCoordinator coordinator({.chunk = 128});
        const size_t r = coordinator.Add(request);
        worker.Run(coordinator);
        logits = worker.logits();
        return BothPhases(coordinator.result(r).accounting);
      };
      AllLogits ended, never, without;
      const v1::PhaseAccounting a = run(1, ended);
      EXPECT_GT(a.skipped_terminated(), 0u);
      const v1::MassSamples& kept = a.measured_mass();
      EXPECT_GT(kept.samples(), 0u);
      EXPECT_LT(kept.sum(), static_cast<double>(kept.samples()) * 0.99);
      EXPECT_EQ(run(1 << 20, never).skipped_terminated(), 0u);
      options.policies[1].mutable_decode()->clear_terminator();
      EXPECT_EQ(run(1, without).skipped_terminated(), 0u);
      ExpectSameBits(never, without);
      EXPECT_NE(ended, without);
    }
  }
}

TEST_F(EngineTest, LayersThatStayDenseAreReadWhole) {
  TestRequest request = MakeRequest(500, kTerminated);
  request.decode.set_dense_layers(3);  // every layer
  TestRequest dense = request;
  dense.policy = kAll;
  const AllLogits found = RunAlone(request);
  for (const auto& [place, logits] : RunAlone(dense)) EXPECT_EQ(found.at(place), logits);
}

// Bug: a dense layer's window was the context. It was shorter than what a reused selection reaches
// into and than infinitehip's least window, and the whole group ended.
TEST_F(EngineTest, ShortContextsOfReusingPoliciesWithDenseLayersAreReadWhole) {
  for (const uint32_t policy : {kHipByInterval, kTokenSelectByCosine, kInfiniteHipByBoth}) {
    for (const int64_t prompt_size : {1, 2, 20, 130}) {
      SCOPED_TRACE(testing::Message() << "policy " << policy << ", prompt " << prompt_size);
      TestRequest request = MakeRequest(prompt_size, policy);
      request.decode.set_dense_layers(2);
      TestRequest dense = request;
      dense.policy = kAll;
      const AllLogits found = RunAlone(request);
      ASSERT_EQ(found.size(), 8u);
      if (prompt_size > 20) continue;
      const AllLogits read = RunAlone(dense);
      ASSERT_EQ(read.size(), 8u);
      for (const auto& [place, logits] : read) EXPECT_EQ(found.at(place), logits);
    }
  }
}

TEST_F(EngineTest, NumbersThatASelectorCannotWorkWithFailTheirSequenceOnly) {
  TestRequest narrow = MakeRequest(300, kInfiniteHip);
  narrow.decode.set_window_tokens(100);
  TestRequest reaching = MakeRequest(300, kHipByInterval);
  reaching.decode.set_window_tokens(7);
  reaching.decode.mutable_reuse()->set_interval(8);
  TestRequest wishing = MakeRequest(300, kHip);
  wishing.decode.mutable_quality()->set_min_mass(0.9f);
  const TestRequest innocent = MakeRequest(300, kInfiniteHip, 3);
  TestWorker worker(*model_);
  TestCoordinator coordinator({.chunk = 128});
  std::vector<std::pair<size_t, const char*>> refused;
  refused.emplace_back(coordinator.Add(narrow), "window_tokens is 100");
  refused.emplace_back(coordinator.Add(reaching), "serves 8 steps");
  const size_t served = coordinator.Add(innocent);
  refused.emplace_back(coordinator.Add(wishing), "min_mass is set");
  worker.Run(coordinator);
  for (const auto& [request, why] : refused) {
    const absl::Status& status = coordinator.result(request).status;
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr(why));
  }
  EXPECT_TRUE(coordinator.result(served).status.ok());
  EXPECT_EQ(coordinator.result(served).tokens.size(), 8u);
}

TEST_F(EngineTest, OptionsMakeShapesOfTheirOwn) {
  const auto run = [&](const std::string& probe) {
    EngineOptions options = TestWorker::DefaultOptions();
    options.policies[1].mutable_prefill()->mutable_infinitehip()->set_preset("5k");
    options.policies[1].mutable_decode()->mutable_infinitehip()->set_preset("5k");
    options.policies[1].mutable_decode()->mutable_infinitehip()->set_probe(probe);
    TestRequest request = MakeRequest(500, kInfiniteHip);
    request.policy = 1;
    return RunAlone(request, 128, options);
  };
  EXPECT_NE(run("first"), run("centre"));
  EngineOptions options = TestWorker::DefaultOptions();
  options.policies[1].mutable_decode()->mutable_infinitehip()->set_probe("last");
  SingleCollective single;
  EXPECT_THAT(
      std::string(Engine::Create(options, model_->transformer(), single).status().message()),
      HasSubstr("there are digest, centre, first"));
}

TEST_F(EngineTest, GroupedPositionsRefuseWhatEstimatesAttention) {
  TestModel model({.folder = folder_->folder(),
                   .extension = PositionExtension::kSelfExtend,
                   .grouped = {.group_size = 4, .window = 100},
                   .edit_weights = {}});
  EngineOptions options = TestWorker::DefaultOptions();
  SingleCollective single;
  const auto create = [&](const auto& edit) {
    options.policies.resize(2);
    v1::SparsityPolicy& policy = options.policies[1] = MakePolicy("all", "quest");
    edit(*policy.mutable_decode());
    return Engine::Create(options, model.transformer(), single).status();
  };
  EXPECT_TRUE(create([](auto&) {}).ok());
  const std::vector<std::pair<const char*, std::function<void(v1::AttentionPolicy&)>>> refused = {
      {"top_p", [](auto& decode) { decode.set_top_p(0.9f); }},
      {"quality.min_mass", [](auto& decode) { decode.mutable_quality()->set_min_mass(0.9f); }},
      {"art", [](auto& decode) { decode.mutable_art(); }}};
  for (const auto& [name, edit] : refused) {
    const absl::Status status = create(edit);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr(std::string("a policy has ") + name));
  }
}

TEST_F(EngineTest, EveryMethodIsAFieldOfThePolicy) {
  std::set<std::string> fields, methods;
  const auto* selectors = v1::AttentionPolicy::descriptor()->FindOneofByName("selector");
  for (int i = 0; i < selectors->field_count(); ++i) fields.insert(selectors->field(i)->name());
  for (const kernels::SelectorMethod& method : kernels::SelectorMethods()) {
    methods.emplace(method.name.data(), method.name.size());
  }
  EXPECT_EQ(methods, fields);
  const auto* terminators = v1::AttentionPolicy::descriptor()->FindOneofByName("terminator");
  ASSERT_EQ(terminators->field_count(), std::ssize(kernels::TerminatorMethods()));
  for (const kernels::TerminatorMethod& method : kernels::TerminatorMethods()) {
    v1::AttentionPolicy policy;
    v1::SetTerminator(method.name, policy);
    EXPECT_EQ(v1::TerminatorName(policy), method.name);
  }
}

TEST_F(EngineTest, LayersAttendWithBudgetsOfTheirOwn) {
  const auto run = [&](std::vector<std::array<uint32_t, 3>> budgets, uint32_t budget,
                       uint32_t policy, v1::RowAccounting& accounting) {
    TestRequest request = MakeRequest(700, policy);
    for (v1::AttentionPolicy* part : {&request.prefill, &request.decode}) {
      part->set_token_budget(budget);
      for (const auto& [first, last, own] : budgets) {
        v1::LayerBudget& layers = *part->add_layer_budgets();
        layers.set_first_layer(first);
        layers.set_last_layer(last);
        layers.set_token_budget(own);
      }
    }
    TestWorker worker(*model_);
    TestCoordinator coordinator({.chunk = 128});
    const size_t r = coordinator.Add(request);
    worker.Run(coordinator);
    accounting = coordinator.result(r).accounting;
    return worker.logits();
  };
  for (const uint32_t policy : {kQuest, kTokenSelect, kHipByInterval, kPruned}) {
    SCOPED_TRACE(policy);
    v1::RowAccounting small, mixed, large;
    const AllLogits of_small = run({}, 64, policy, small);
    const AllLogits of_large = run({}, 256, policy, large);
    ExpectSameBits(of_large, run({{0, 1, 256}, {2, 1023, 256}}, 2, policy, mixed));
    ExpectSameBits(of_small, run({{0, 2, 64}}, 256, policy, mixed));
    EXPECT_NE(of_small, run({{1, 1, 256}}, 64, policy, mixed));
    EXPECT_EQ(mixed.attending_rows(), small.attending_rows());
    if (policy == kPruned) continue;  // the pruned number differs in every layer
    // Except tokens that lists and windows share.
    const auto expected =
        static_cast<double>(2 * small.attended_tokens() + large.attended_tokens());
    EXPECT_NEAR(3 * static_cast<double>(mixed.attended_tokens()), expected, 0.01 * expected);
    EXPECT_LT(1.1 * static_cast<double>(3 * small.attended_tokens()), expected);
  }
}

TEST_F(EngineTest, DenseLayersReadEverything) {
  TestRequest request = MakeRequest(500, kStreaming);
  request.prefill.set_dense_layers(3);
  request.decode.set_dense_layers(3);
  TestRequest dense = request;
  dense.policy = kAll;
  ExpectSameBits(RunAlone(dense), RunAlone(request));
}

TEST_F(EngineTest, MeasuresMassWithoutUsingPages) {
  const auto run = [&](double rate, uint32_t policy, kvstore::KvStoreStats& stats) {
    EngineOptions options = TestWorker::DefaultOptions();
    options.mass_sample_rate = rate;
    TestWorker worker(*model_, options);
    TestCoordinator coordinator({.chunk = 128});
    const size_t r = coordinator.Add(MakeRequest(500, policy));
    worker.Run(coordinator);
    stats = worker.engine().store().stats();
    return coordinator.result(r).accounting.decode();
  };
  kvstore::KvStoreStats measured, unmeasured;
  const v1::PhaseAccounting quest = run(1.0, kAllThenQuest, measured);
  // Tail and generated tokens, 3 layers, 8 query heads.
  EXPECT_EQ(quest.measured_mass().samples(), (20u + 7u) * 3u * 8u);
  const auto samples = static_cast<double>(quest.measured_mass().samples());
  double rounded_down = 0;
  for (const auto& [permille, count] : quest.measured_mass().by_permille()) {
    rounded_down += 1e-3 * permille * static_cast<double>(count);
  }
  EXPECT_LE(rounded_down, quest.measured_mass().sum());
  EXPECT_GT(rounded_down, quest.measured_mass().sum() - 1e-3 * samples);
  const double mean = quest.measured_mass().sum() / samples;
  EXPECT_GT(mean, 0.3);
  EXPECT_LT(mean, 1.0);
  run(0.0, kAllThenQuest, unmeasured);
  EXPECT_EQ(measured.device_hits, unmeasured.device_hits);
  EXPECT_EQ(run(1.0, kAll, measured).measured_mass().samples(), 0u);
  const uint64_t sampled = run(0.25, kAllThenQuest, measured).measured_mass().samples();
  EXPECT_GT(sampled, quest.measured_mass().samples() / 8);
  EXPECT_LT(sampled, quest.measured_mass().samples() / 2);
}

// Bug: where a prompt was read with a sparse policy, its many queries hid the answer's.
TEST_F(EngineTest, MassOfReadingIsToldApartFromThatOfDecoding) {
  EngineOptions options = TestWorker::DefaultOptions();
  options.mass_sample_rate = 1;
  TestWorker worker(*model_, options);
  TestCoordinator coordinator({.chunk = 128});
  TestRequest request = MakeRequest(500, kQuest);
  request.prefill = MakeNumbers(64, 64, 4096);  // everything
  request.decode = MakeNumbers(0, 1, 1);
  const size_t r = coordinator.Add(request);
  worker.Run(coordinator);
  const v1::RowAccounting& a = coordinator.result(r).accounting;
  // 3 layers, 8 query heads; the tail is decoding.
  EXPECT_EQ(a.prefill().measured_mass().samples(), 480u * 3u * 8u);
  EXPECT_DOUBLE_EQ(a.prefill().measured_mass().sum(), 480 * 3 * 8);
  EXPECT_EQ(a.prefill().skipped_selected_out(), 0u);
  EXPECT_EQ(a.decode().measured_mass().samples(), (20u + 7u) * 3u * 8u);
  EXPECT_LT(a.decode().measured_mass().sum(), 0.5 * (20 + 7) * 3 * 8);
  EXPECT_GT(a.decode().skipped_selected_out(), a.decode().blocks_total() / 2);
}

TEST_F(EngineTest, BudgetsAreTheTokensThatDecodingAttendsTo) {
  const auto run = [&](uint32_t policy) {
    TestWorker worker(*model_);
    TestCoordinator coordinator({.chunk = 128});
    TestRequest request = MakeRequest(500, policy);
    request.tail_tokens = 0;
    const size_t r = coordinator.Add(request);
    worker.Run(coordinator);
    return coordinator.result(r).accounting;
  };
  // Seven generated tokens are computed, at positions 500 to 506.
  const auto rows =
      static_cast<uint64_t>(7 * 3 * model_->transformer().options().config.num_kv_heads);
  EXPECT_EQ(run(kAll).attending_rows(), rows);
  EXPECT_EQ(run(kAll).attended_tokens(), rows * 504);
  EXPECT_EQ(run(kStreaming).attended_tokens(), rows * (16 + 70));
}

// Rule R2: a context that budgets cover keeps its positions, also when keys are cached un-rotated.
// With a single token more, positions are compact.
TEST_F(EngineTest, ExtendedPositionsOfShortContextsAreTheModelsOwn) {
  TestModel extended({.folder = folder_->folder(),
                      .extension = PositionExtension::kStreaming,
                      .edit_weights = {}});
  for (const uint32_t policy : {kAll, kStreaming, kQuest, kTokenSelect, kHip, kInfiniteHip}) {
    for (const uint32_t budget : {64u, 4096u}) {
      SCOPED_TRACE(testing::Message() << "policy " << policy << ", budget " << budget);
      TestRequest request = MakeRequest(500, policy);
      for (v1::AttentionPolicy* part : {&request.prefill, &request.decode}) {
        (policy == kStreaming ? part->set_window_tokens(budget) : part->set_token_budget(budget));
      }
      TestWorker worker(extended);
      TestCoordinator coordinator({.chunk = 128});
      coordinator.Add(request);
      worker.Run(coordinator);
      if (policy == kAll || budget == 4096) {
        ExpectSameBits(RunAlone(request), worker.logits());
      } else {
        EXPECT_NE(RunAlone(request), worker.logits());
      }
    }
  }
}

TEST_F(EngineTest, WholeBudgetKeepsAllMass) {
  TestModel grouped({.folder = folder_->folder(),
                     .extension = PositionExtension::kSelfExtend,
                     .grouped = {.group_size = 4, .window = 100},
                     .edit_weights = {}});
  EngineOptions options = TestWorker::DefaultOptions();
  options.policies = {options.policies[kAllThenQuest]};
  options.mass_sample_rate = 1;
  for (TestModel* model : {model_.get(), &grouped}) {
    for (const uint32_t budget : {64u, 4096u}) {
      TestWorker worker(*model, options);
      TestCoordinator coordinator({.chunk = 128});
      TestRequest request = MakeRequest(500, kAllThenQuest);
      request.policy = 0;
      request.decode = MakeNumbers(64, 64, budget);
      const size_t r = coordinator.Add(request);
      worker.Run(coordinator);
      const v1::MassSamples& mass = coordinator.result(r).accounting.decode().measured_mass();
      const auto all = static_cast<double>(mass.samples());
      EXPECT_GT(mass.samples(), 0u);
      if (budget == 4096) {
        EXPECT_DOUBLE_EQ(mass.sum(), all);
      } else {
        EXPECT_LT(mass.sum(), 0.9 * all);
      }
    }
  }
}

TEST_F(EngineTest, SampledTokensDependOnSeedAndPositionOnly) {
  TestRequest request = MakeRequest(100, kAll);
  request.sampling.set_temperature(1.5);
  request.sampling.set_seed(42);
  const auto tokens = [&](int others) {
    TestWorker worker(*model_);
    TestCoordinator coordinator({.chunk = 64});
    for (int i = 0; i < others; ++i) {
      coordinator.Add(MakeRequest(90, kAll, static_cast<uint32_t>(i)));
    }
    const size_t r = coordinator.Add(request);
    worker.Run(coordinator);
    return coordinator.result(r).tokens;
  };
  const std::vector<uint32_t> alone = tokens(0);
  EXPECT_EQ(alone, tokens(5));
  request.sampling.set_seed(43);
  EXPECT_NE(alone, tokens(0));
}

// A request that repeats itself unless it is penalised.
TestRequest PenalisedRequest() {
  TestRequest request = MakeRequest(300, kAll);
  request.max_tokens = 24;
  request.sampling.set_repetition_penalty(1.2f);
  request.sampling.set_frequency_penalty(0.3f);
  request.sampling.set_presence_penalty(0.2f);
  request.sampling.set_logprobs(5);
  v1::LogitBias& bias = *request.sampling.add_logit_bias();
  bias.set_token_id(17);
  bias.set_bias(0.5f);
  return request;
}

// The definition, computed from the raw logits and the tokens so far.
uint32_t DefinedToken(TestWorker::Logits logits, const TestRequest& request,
                      const std::vector<uint32_t>& output) {
  const v1::RowSampling& sampling = request.sampling;
  for (const v1::LogitBias& bias : sampling.logit_bias()) logits[bias.token_id()] += bias.bias();
  std::set<uint32_t> seen(request.prompt.begin(), request.prompt.end());
  seen.insert(output.begin(), output.end());
  for (const uint32_t token : seen) {
    float& logit = logits[token];
    logit =
        logit > 0 ? logit / sampling.repetition_penalty() : logit * sampling.repetition_penalty();
    const auto count = std::count(output.begin(), output.end(), token);
    if (count == 0) continue;
    logit -= static_cast<float>(count) * sampling.frequency_penalty() + sampling.presence_penalty();
  }
  return static_cast<uint32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

TEST_F(EngineTest, PenaltiesCountTheSequencesOwnTokensAndLogprobsAreTheModels) {
  const TestRequest request = PenalisedRequest();
  TestWorker worker(*model_);
  TestCoordinator coordinator({.chunk = 128});
  const size_t r = coordinator.Add(request);
  worker.Run(coordinator);
  const TestResult& result = coordinator.result(r);
  TestRequest free = request;
  free.sampling = Greedy();
  TestCoordinator without({.chunk = 128});
  const size_t f = without.Add(free);
  TestWorker other(*model_);
  other.Run(without);
  EXPECT_NE(result.tokens, without.result(f).tokens) << "the penalties changed nothing";

  for (size_t i = 0; i < result.tokens.size(); ++i) {
    const auto position = static_cast<int64_t>(request.prompt.size() + i) - 1;
    const TestWorker::Logits& logits = worker.logits().at({0, position});
    const std::vector<uint32_t> output(result.tokens.begin(),
                                       result.tokens.begin() + static_cast<std::ptrdiff_t>(i));
    EXPECT_EQ(result.tokens[i], DefinedToken(logits, request, output)) << "token " << i;
    double sum = 0;
    for (const float logit : logits) sum += std::exp(static_cast<double>(logit));
    const v1::TokenLogprobs& logprobs = result.logprobs[i];
    EXPECT_NEAR(logprobs.logprob(), static_cast<double>(logits[result.tokens[i]]) - std::log(sum),
                1e-5);
    ASSERT_EQ(logprobs.top_size(), 5);
    TestWorker::Logits sorted = logits;
    std::sort(sorted.begin(), sorted.end(), std::greater<>());
    for (int n = 0; n < 5; ++n) {
      EXPECT_EQ(logits[logprobs.top(n).token_id()], sorted[static_cast<size_t>(n)]);
      EXPECT_NEAR(logprobs.top(n).logprob(),
                  static_cast<double>(sorted[static_cast<size_t>(n)]) - std::log(sum), 1e-5);
    }
  }
}

TEST_F(EngineTest, PenaltiesAndLogprobsDoNotDependOnNeighboursChunksOrPreemption) {
  const TestRequest penalised = PenalisedRequest();
  const auto run = [&](const TestRequest& request, int others, int64_t chunk) {
    TestWorker worker(*model_);
    TestCoordinator coordinator({.chunk = chunk});
    for (int i = 0; i < others; ++i) {
      coordinator.Add(MakeRequest(90 + 40 * i, kAll, static_cast<uint32_t>(i)));
    }
    const size_t r = coordinator.Add(request);
    worker.Run(coordinator);
    const TestResult& result = coordinator.result(r);
    std::vector<std::string> answer;
    for (size_t i = 0; i < result.tokens.size(); ++i) {
      answer.push_back(absl::StrCat(result.tokens[i], ":", result.logprobs[i].SerializeAsString()));
    }
    return answer;
  };
  const std::vector<std::string> alone = run(penalised, 0, 512);
  EXPECT_EQ(alone.size(), 24u);
  EXPECT_EQ(alone, run(penalised, 0, 64));
  EXPECT_EQ(alone, run(penalised, 6, 128));
  // Preempted after its tenth token: tokens generated before still count as output.
  TestRequest resumed = penalised;
  for (size_t i = 0; i < 10; ++i) {
    resumed.generated.push_back(static_cast<uint32_t>(std::stoul(alone[i])));
  }
  resumed.max_tokens -= 10;
  EXPECT_EQ(std::vector(alone.begin() + 10, alone.end()), run(resumed, 2, 128));
}

TEST_F(EngineTest, StopTokensWaitForMinTokens) {
  TestRequest request = MakeRequest(100, kAll);
  const auto tokens = [&] {
    TestWorker worker(*model_);
    TestCoordinator coordinator({.chunk = 64});
    const size_t r = coordinator.Add(request);
    worker.Run(coordinator);
    return coordinator.result(r).tokens;
  };
  const std::vector<uint32_t> free = tokens();
  for (uint32_t token = 0; token < 101; ++token) {
    if (token != 5) request.sampling.add_stop_token_ids(token);
  }
  request.sampling.set_min_tokens(3);
  const std::vector<uint32_t> banned = tokens();
  EXPECT_THAT(std::vector(banned.begin(), banned.begin() + 3), testing::Each(5u));
  EXPECT_NE(banned[3], 5u);
  request.sampling.set_min_tokens(0);
  EXPECT_EQ(free, tokens());
}

TEST_F(EngineTest, NanRowFailsAloneWithDataLoss) {
  // Token 100 is poison, and is kept from being generated.
  TestModel model({.folder = folder_->folder(), .edit_weights = [](ModelWeights& weights) {
                     const kernels::TensorView table = weights.embedding.view;
                     table.As<float>()[100 * table.dim(1)] =
                         std::numeric_limits<float>::quiet_NaN();
                   }});
  TestRequest healthy = MakeRequest(200, kQuest);
  for (uint32_t& token : healthy.prompt) token %= 100;
  healthy.sampling.add_stop_token_ids(100);
  healthy.sampling.set_min_tokens(1000);
  TestRequest poisoned = healthy;
  poisoned.prompt[10] = 100;
  poisoned.prompt.resize(150);
  TestWorker worker(model);
  TestCoordinator coordinator({.chunk = 128});
  const size_t good = coordinator.Add(healthy);
  const size_t bad = coordinator.Add(poisoned);
  worker.Run(coordinator);
  EXPECT_EQ(coordinator.result(bad).status.code(), absl::StatusCode::kDataLoss);
  EXPECT_TRUE(coordinator.result(bad).tokens.empty());
  ASSERT_TRUE(coordinator.result(good).status.ok());
  ExpectSameBits(RunAlone(healthy), worker.logits());
}

// Otherwise its KV would be sealed, and found by others.
TEST_F(EngineTest, NanFailsTheChunkThatReadsIt) {
  TestModel model({.folder = folder_->folder(), .edit_weights = [](ModelWeights& weights) {
                     const kernels::TensorView table = weights.embedding.view;
                     table.As<float>()[100 * table.dim(1)] =
                         std::numeric_limits<float>::quiet_NaN();
                   }});
  TestRequest request = MakeRequest(300, kStreaming);
  request.prompt[10] = 100;
  TestWorker worker(model);
  TestCoordinator coordinator({.chunk = 64});
  coordinator.Add(request);
  const auto reply = worker.engine().Step(coordinator.NextPlan());
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(static_cast<absl::StatusCode>(reply->results(0).error_code()),
            absl::StatusCode::kDataLoss);
}

// The second time with plans that were made before the coordinator heard of the failure.
TEST_F(EngineTest, RowWithoutRoomFailsAlone) {
  EngineOptions options = TestWorker::DefaultOptions();
  options.kv.device = 5 * model_->transformer().kv_layout(kernels::DType::kFloat32).block_bytes();
  for (const bool ahead : {false, true}) {
    TestWorker worker(*model_, options);
    TestCoordinator coordinator({.chunk = 256});
    const size_t fits = coordinator.Add(MakeRequest(200, kAll));
    const size_t does_not = coordinator.Add(MakeRequest(300, kAll));
    ahead ? worker.RunAhead(coordinator) : worker.Run(coordinator);
    EXPECT_TRUE(coordinator.result(fits).status.ok());
    EXPECT_EQ(coordinator.result(does_not).status.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_EQ(coordinator.rows_in_vain(), ahead ? 1 : 0);
  }
}

TEST_F(EngineTest, BlocksFilledBeforeAFailureMayStillBeSealed) {
  TestModel model({.folder = folder_->folder(), .edit_weights = [](ModelWeights& weights) {
                     const kernels::TensorView table = weights.embedding.view;
                     table.As<float>()[100 * table.dim(1)] =
                         std::numeric_limits<float>::quiet_NaN();
                   }});
  TestRequest poisoned = MakeRequest(300, kStreaming);
  for (uint32_t& token : poisoned.prompt) token %= 100;
  poisoned.prompt[100] = 100;
  TestWorker worker(model);
  TestCoordinator coordinator({.chunk = 64, .keep_blocks = true});
  const size_t r = coordinator.Add(poisoned);
  worker.RunAhead(coordinator);
  EXPECT_EQ(coordinator.result(r).status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(coordinator.result(r).blocks,
              testing::SizeIs(1));  // sealed; the poison is in the next block
  EXPECT_EQ(coordinator.rows_in_vain(), 1);
}

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

TEST_F(EngineTest, MissingBlocksAreNamedAndNothingIsComputed) {
  TestWorker worker(*model_);
  TestCoordinator coordinator({});
  TestRequest request = MakeRequest(500, kAll);
  request.cached_blocks = {900, 901};
  coordinator.Add(request);
  v1::StepPlan plan = coordinator.NextPlan();
  auto reply = worker.engine().Step(plan);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_THAT(reply->missing_blocks(), testing::ElementsAre(900, 901));
  EXPECT_EQ(reply->results_size(), 0);
  // The slot is still free: the same start without the blocks is accepted.
  plan.set_step(plan.step() + 1);
  plan.mutable_starts(0)->clear_cached_blocks();
  plan.mutable_rows(0)->set_begin(0);
  plan.mutable_rows(0)->set_num_tokens(64);
  plan.mutable_rows(0)->clear_new_blocks();
  plan.mutable_rows(0)->add_new_blocks(1);
  reply = worker.engine().Step(plan);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(reply->results_size(), 1);
}

TEST_F(EngineTest, PlanOfAnotherEpochIsRefused) {
  TestWorker worker(*model_);
  TestCoordinator coordinator({.group_epoch = 2});
  EXPECT_EQ(worker.engine().Step(coordinator.NextPlan()).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST_F(EngineTest, RepeatedPlanIsRefused) {
  TestWorker worker(*model_);
  TestCoordinator coordinator({});
  const v1::StepPlan plan = coordinator.NextPlan();
  ASSERT_TRUE(worker.engine().Step(plan).ok());
  EXPECT_EQ(worker.engine().Step(plan).status().code(), absl::StatusCode::kFailedPrecondition);
}

// Examples of wrong plans: each changes a good one.
struct WrongPlan {
  std::string name;
  std::function<void(v1::StepPlan&)> spoil;
  std::string message;
};

class EngineWrongPlanTest : public EngineTest, public testing::WithParamInterface<WrongPlan> {};

TEST_P(EngineWrongPlanTest, IsInternalErrorAndEndsTheEngine) {
  TestWorker worker(*model_);
  TestCoordinator coordinator({.chunk = 128, .keep_blocks = true});
  coordinator.Add(MakeRequest(100, kQuest));  // leaves block 1 sealed
  worker.Run(coordinator);
  TestRequest running = MakeRequest(200, kQuest);
  coordinator.Add(running);
  for (int i = 0; i < 2; ++i) {
    const v1::StepPlan plan = coordinator.NextPlan();
    const auto reply = worker.engine().Step(plan);
    ASSERT_TRUE(reply.ok()) << reply.status();
    coordinator.Apply(plan, *reply);
  }
  coordinator.Add(MakeRequest(100, kQuest));
  v1::StepPlan plan = coordinator.NextPlan();
  GetParam().spoil(plan);
  const auto reply = worker.engine().Step(plan);
  EXPECT_EQ(reply.status().code(), absl::StatusCode::kInternal) << reply.status();
  EXPECT_THAT(std::string(reply.status().message()), HasSubstr(GetParam().message));
  EXPECT_EQ(worker.engine().Step(coordinator.NextPlan()).status(), reply.status());
}

// Row 0 decodes slot 0 (200 tokens of prompt); row 1 is the whole prompt of start 0 in slot 1.
INSTANTIATE_TEST_SUITE_P(
    Plans, EngineWrongPlanTest,
    testing::Values(
        WrongPlan{"SlotOutOfRange", [](auto& p) { p.mutable_starts(0)->set_slot(16); }, "slot 16"},
        WrongPlan{"SlotTaken", [](auto& p) { p.mutable_starts(0)->set_slot(0); }, "taken"},
        WrongPlan{"EmptyPrompt", [](auto& p) { p.mutable_starts(0)->clear_tokens(); }, "0 tokens"},
        WrongPlan{"PromptTooLong",
                  [](auto& p) {
                    for (int i = 0; i < 5000; ++i) p.mutable_starts(0)->add_tokens(1);
                  },
                  "4096"},
        WrongPlan{"NothingButAnswer",
                  [](auto& p) { p.mutable_starts(0)->set_num_prompt_tokens(0); },
                  "a prompt of 0 of its tokens"},
        WrongPlan{"PromptLongerThanTheTokens",
                  [](auto& p) { p.mutable_starts(0)->set_num_prompt_tokens(101); },
                  "a prompt of 101 of its tokens; it must have 1 to 100"},
        WrongPlan{"TokenOutOfVocabulary", [](auto& p) { p.mutable_starts(0)->set_tokens(3, 101); },
                  "token 101"},
        WrongPlan{"StopTokenOutOfVocabulary",
                  [](auto& p) {
                    p.mutable_starts(0)->mutable_sampling()->add_stop_token_ids(0xffffffffu);
                  },
                  "token 4294967295"},
        WrongPlan{"NoSuchPolicy", [](auto& p) { p.mutable_starts(0)->set_policy_index(99); },
                  "policy 99"},
        WrongPlan{"NothingLeftToCompute",
                  [](auto& p) {
                    p.mutable_starts(0)->add_cached_blocks(1);
                    p.mutable_starts(0)->add_cached_blocks(1);
                  },
                  "nothing to compute"},
        WrongPlan{"RowOfFreeSlot", [](auto& p) { p.mutable_rows(1)->set_slot(7); }, "slot 7"},
        WrongPlan{"RowOfNoSlot", [](auto& p) { p.mutable_rows(1)->set_slot(0xffffffffu); },
                  "slot 4294967295"},
        WrongPlan{"TwoRowsOfASlot", [](auto& p) { *p.add_rows() = p.rows(0); }, "two rows"},
        WrongPlan{"NoTokens", [](auto& p) { p.mutable_rows(0)->set_num_tokens(0); }, "nothing"},
        WrongPlan{"TooManyTokens", [](auto& p) { p.mutable_rows(0)->set_num_tokens(0xffffffffu); },
                  "the step holds 4096"},
        WrongPlan{"UnknownTokens", [](auto& p) { p.mutable_rows(0)->set_num_tokens(2); }, "tokens"},
        WrongPlan{"GapInKv", [](auto& p) { p.mutable_rows(1)->set_begin(64); }, "KV ends at 0"},
        WrongPlan{"TruncatedIntoSealedBlock",
                  [](auto& p) {
                    p.mutable_rows(0)->set_begin(185);
                    p.mutable_rows(0)->set_sample(false);
                    p.mutable_rows(0)->clear_new_blocks();
                  },
                  "sealed"},
        WrongPlan{"ChunkNotOnAPage",
                  [](auto& p) {
                    p.mutable_rows(1)->set_num_tokens(63);
                    p.mutable_rows(1)->set_sample(false);
                  },
                  "multiple of 64"},
        WrongPlan{"SamplesInsidePrompt",
                  [](auto& p) {
                    p.mutable_rows(1)->set_num_tokens(64);
                    p.mutable_rows(1)->mutable_new_blocks()->RemoveLast();
                  },
                  "sampling inside"},
        WrongPlan{"TooFewBlocks",
                  [](auto& p) { p.mutable_rows(1)->mutable_new_blocks()->RemoveLast(); },
                  "new blocks"},
        WrongPlan{"TooManyBlocks", [](auto& p) { p.mutable_rows(1)->add_new_blocks(77); },
                  "new blocks"},
        WrongPlan{"BlockInUse", [](auto& p) { p.mutable_rows(1)->set_new_blocks(0, 1); }, "1"},
        WrongPlan{"SealsUnknownBlock",
                  [](auto& p) {
                    auto& seal = *p.add_seals();
                    seal.set_block_id(12345);
                    seal.set_prefix_hash(std::string(32, 'x'));
                  },
                  "12345"},
        WrongPlan{"SealsSealedBlock",
                  [](auto& p) {
                    auto& seal = *p.add_seals();
                    seal.set_block_id(1);
                    seal.set_prefix_hash(std::string(32, 'x'));
                  },
                  "block 1"},
        WrongPlan{"SealsOpenBlock",
                  [](auto& p) {
                    auto& seal = *p.add_seals();
                    seal.set_block_id(6);  // the last of the running prompt, not full
                    seal.set_prefix_hash(std::string(32, 'x'));
                  },
                  "not complete"},
        WrongPlan{"StoresHalfABlock", [](auto& p) { p.add_persists()->add_tokens(1); }, "1 tokens"},
        WrongPlan{"RestoresWithoutAHash", [](auto& p) { p.add_restores()->set_block_id(500); },
                  "0 bytes"},
        WrongPlan{"RestoresABlockInUse",
                  [](auto& p) {
                    auto& restore = *p.add_restores();
                    restore.set_block_id(1);
                    restore.set_prefix_hash(std::string(32, 'x'));
                  },
                  "block 1"},
        WrongPlan{"FreesFreeSlot", [](auto& p) { p.add_free_slots(9); }, "slot 9"}),
    [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace kvasir::worker
