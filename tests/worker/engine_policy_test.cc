// How the engine serves selectors, pruners, terminators and reuse rules, and their numbers.
#include <array>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "kernels/sparse/methods.h"
#include "tests/worker/engine_fixture.h"
#include "worker/engine/engine.h"

namespace kvasir::worker {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using AllLogits = std::map<std::pair<int64_t, int64_t>, TestWorker::Logits>;

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

}  // namespace
}  // namespace kvasir::worker
