// Attention mass and attended tokens, as the engine counts them.
#include "gtest/gtest.h"

#include "tests/worker/engine_fixture.h"
#include "worker/engine/engine.h"

namespace kvasir::worker {
namespace {

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

}  // namespace
}  // namespace kvasir::worker
