// Behaviour and reports of an engine under policies with min_mass.
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

#include "tests/worker/random_model_fixture.h"
#include "tests/worker/test_coordinator.h"
#include "tests/worker/test_worker.h"

namespace kvasir::worker {
namespace {

// 7 generated tokens and 20 of the tail, 3 layers, 4 KV heads of 2 query heads each.
constexpr int64_t kPromptTokens = 900;
constexpr uint32_t kContract = 1, kSameWithout = 2;  // policies

struct Ran {
  std::map<std::pair<int64_t, int64_t>, TestWorker::Logits> logits;
  v1::RowAccounting accounting;
};

class QualityContractTest : public RandomModelFixture {
 protected:
  static TestRequest Request(const std::string& on_violation, float min_mass,
                             uint32_t policy = kContract) {
    std::mt19937 random(7);
    std::vector<uint32_t> prompt(kPromptTokens);
    for (uint32_t& token : prompt) token = static_cast<uint32_t>(random() % 101);
    TestRequest request = MakeSparseRequest(std::move(prompt), policy);
    request.decode.mutable_quality()->set_min_mass(min_mass);
    request.decode.mutable_quality()->set_on_violation(on_violation);
    return request;
  }
  Ran Run(const TestRequest& request, const v1::SparsityPolicy& policy) const {
    EngineOptions options = TestWorker::DefaultOptions();
    options.mass_sample_rate = 1;
    options.policies[kSameWithout] = policy;
    options.policies[kContract] = policy;
    options.policies[kContract].mutable_decode()->mutable_quality()->set_min_mass(0.5f);
    TestWorker worker(*model_, options);
    TestCoordinator coordinator({.chunk = 128});
    const size_t r = coordinator.Add(request);
    worker.Run(coordinator);
    return {.logits = worker.logits(), .accounting = coordinator.result(r).accounting};
  }
  static double Mean(const v1::MassSamples& mass) {
    return mass.sum() / static_cast<double>(mass.samples());
  }
};

TEST_F(QualityContractTest, ReportingChangesNothing) {
  const v1::SparsityPolicy quest = MakePolicy("all", "quest");
  const Ran without = Run(Request("report", 0, kSameWithout), quest);
  const Ran reported = Run(Request("report", 0.9f), quest);
  EXPECT_EQ(without.logits, reported.logits);
  EXPECT_FALSE(without.accounting.has_contract());
  EXPECT_EQ(without.accounting.estimated_mass().samples(), 0u);
  const v1::RowAccounting& a = reported.accounting;
  const v1::PhaseAccounting pages = BothPhases(a);
  EXPECT_EQ(a.contract().selections(), (20u + 7u) * 3u * 4u);
  EXPECT_GT(a.contract().missed(), 0u);
  EXPECT_EQ(a.contract().dense() + a.contract().widened(), 0u);
  EXPECT_EQ(a.estimated_mass().samples(), 2 * a.contract().selections());
  EXPECT_EQ(a.estimated_mass().samples(), pages.measured_mass().samples());
  EXPECT_NEAR(Mean(a.estimated_mass()), Mean(pages.measured_mass()), 0.01);
  EXPECT_LT(Mean(pages.measured_mass()), 0.9);
}

TEST_F(QualityContractTest, AWishForEverythingIsDense) {
  TestRequest dense = Request("dense", 0, 0);
  for (const std::string selector : {"streaming", "quest", "tokenselect"}) {
    const v1::SparsityPolicy policy = MakePolicy("all", selector);
    const Ran ran = Run(Request("dense", 1), policy);
    EXPECT_EQ(ran.logits, Run(dense, policy).logits);
    EXPECT_EQ(ran.accounting.contract().dense(), ran.accounting.contract().selections());
    EXPECT_EQ(Mean(ran.accounting.estimated_mass()), 1);
    const v1::PhaseAccounting pages = BothPhases(ran.accounting);
    EXPECT_EQ(pages.skipped_selected_out() + pages.skipped_window(), 0u);
  }
}

TEST_F(QualityContractTest, WhatIsPromisedIsKept) {
  for (const std::string action : {"dense", "widen"}) {
    for (const std::string selector : {"quest", "tokenselect", "hip"}) {
      SCOPED_TRACE(selector + " " + action);
      const Ran ran = Run(Request(action, 0.4f), MakePolicy("all", selector));
      const v1::RowAccounting& a = ran.accounting;
      const v1::PhaseAccounting pages = BothPhases(a);
      const v1::ContractReport& contract = a.contract();
      const uint64_t mended = contract.dense() + contract.widened();
      EXPECT_EQ(mended, action == "dense" ? contract.dense() : contract.widened());
      EXPECT_GT(mended, 0u);
      EXPECT_EQ(contract.missed(), 0u);
      EXPECT_GT(pages.measured_mass().samples(), 0u);
      for (const auto& [permille, samples] : pages.measured_mass().by_permille()) {
        EXPECT_GE(permille, 390u) << samples;
      }
      if (action == "widen") {
        EXPECT_GT(pages.skipped_selected_out(), 0u) << "all rows widened to all";
      }
    }
  }
}

TEST_F(QualityContractTest, LayersThatStayDenseHaveNoContract) {
  TestRequest request = Request("dense", 1);
  request.decode.set_dense_layers(2);
  const Ran ran = Run(request, MakePolicy("all", "quest"));
  EXPECT_EQ(ran.accounting.contract().selections(), (20u + 7u) * 1u * 4u);
}

// Bug: the pruner left out the reused selections.
TEST_F(QualityContractTest, SelectionsThatServeAgainArePruned) {
  v1::SparsityPolicy policy = MakeReusingPolicy("tokenselect", "interval");
  policy.mutable_decode()->set_top_p(1);
  TestRequest request = Request("report", 0, kSameWithout);
  request.tail_tokens = 0;
  request.decode.set_top_p(1e-6f);
  request.decode.mutable_reuse()->set_interval(8);
  const Ran ran = Run(request, policy);
  ASSERT_EQ(ran.accounting.stages_reused_size(), static_cast<int>(kernels::kMaxStages));
  EXPECT_GT(ran.accounting.stages_reused(0), 0u);
  EXPECT_EQ(ran.accounting.attended_tokens(), ran.accounting.attending_rows() * (16 + 70));
}

}  // namespace
}  // namespace kvasir::worker
