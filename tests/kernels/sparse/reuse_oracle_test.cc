// Consecutive decode steps under the reuse rules against the independent definitions of
// reuse_oracle.py, which recorded what every step must reuse and choose.
#include <array>
#include <gtest/gtest.h>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "nlohmann/json.hpp"

#include "kernels/sparse/policy.h"
#include "kernels/sparse/reuse/reusing_select.h"
#include "tests/kernels/sparse/oracle_batch.h"

namespace kvasir::kernels {
namespace {

using nlohmann::json;

constexpr auto kOwnPart = static_cast<OracleSide>(3);

// A block of one query for each step.
void FillSteps(const json& c, AttentionBatch& batch) {
  const int64_t first = c["first"], run = c["query_run"];
  const float steady = c["steady"];
  for (int64_t step = 0; step < c["steps"]; ++step) {
    batch.AddBlock(0, first + step, 1);
    for (int64_t head = 0; head < batch.heads(); ++head) {
      for (int64_t i = 0; i < kDim; ++i) {
        batch.q(step, head)[i] =
            steady * OracleValue(c["seed"], OracleSide::kQuery, (first + step) / run, head, i) +
            OracleValue(c["seed"], kOwnPart, first + step, head, i);
      }
    }
  }
}

void ExpectStep(const json& expected, const SelectionHeader& header, const SelectionEntry* list,
                Ranges& chosen) {
  ASSERT_EQ(header.kind == SelectionHeader::Kind::kAll, expected == "all");
  if (expected == "all") return;
  EXPECT_EQ(header.reused_stages, expected[0].get<int32_t>());
  EXPECT_EQ(header.window_begin, expected[1].get<int64_t>());
  if (!expected[2].is_null()) chosen = expected[2].get<Ranges>();
  EXPECT_EQ(ListedRanges(header, list, &SelectionEntry::chosen, Within::kAll), chosen);
  EXPECT_EQ(ListedRanges(header, list, &SelectionEntry::live, Within::kAll), chosen);
}

void RunCase(const json& c, DType dtype) {
  const int64_t context = c["first"].get<int64_t>() + c["steps"].get<int64_t>();
  AttentionBatch batch({.activation = dtype,
                        .kv = dtype,
                        .head_dim = kDim,
                        .kv_heads = kKvHeads,
                        .group = c["group"]},
                       1, context, 1);
  ASSERT_NO_FATAL_FAILURE(FillKeys(c, context, batch));
  FillSteps(c, batch);
  MethodOptions options;
  for (const auto& [name, value] : c["options"].items()) options.push_back({name, value});
  const auto selector = MakeSelector(c["selector"].get<std::string>(), options).value();
  const auto rule = MakeReuseRule(c["rule"].get<std::string>()).value();
  PolicyNumbers numbers = {.sink_tokens = c["sink"],
                           .window_tokens = c["window"],
                           .budget_tokens = c["budget"],
                           .reuse = {.interval = c["interval"],
                                     .theta = c["theta"],
                                     .theta_force = c["theta_force"],
                                     .max_age = c["max_age"]}};
  numbers.reach_tokens = ReachTokens(*selector, *rule, numbers.reuse);
  const auto memory = MakeSelectionMemory({*selector, *rule, batch.kv().View().layout, c["group"],
                                           numbers, context})
                          .value();
  std::vector<RowMemory*> memories;
  for (int64_t row = 0; row < c["steps"].get<int64_t>() * kKvHeads; ++row) {
    memories.push_back(&memory->row(batch.shape().layer, row % kKvHeads));
  }
  PageSelection selection = batch.MakeSelection(selector->MaxEntries(numbers, context));
  const std::vector<PolicyNumbers> all_numbers(batch.blocks().size(), numbers);
  SelectParams params = batch.ParamsForSelect(all_numbers);
  params.memories = memories;
  SerialExecutor executor;
  const absl::Status status = SelectReusing(*selector, *rule, params, selection, executor);
  ASSERT_TRUE(status.ok()) << status;
  std::array<Ranges, kKvHeads> chosen;
  for (int64_t row = 0; row < selection.num_rows; ++row) {
    const auto head = static_cast<size_t>(row % kKvHeads);
    SCOPED_TRACE(testing::Message() << "step " << row / kKvHeads << ", KV head " << head);
    ASSERT_NO_FATAL_FAILURE(ExpectStep(c["replays"][head][static_cast<size_t>(row / kKvHeads)],
                                       selection.header(row), selection.list(row), chosen[head]));
  }
}

TEST(ReuseOracle, EveryStepReusesAndChoosesWhatTheDefinitionDoes) {
  const json cases = ReadOracleCases("reuse.json");
  ASSERT_GE(cases.size(), 45u);
  for (const json& c : cases) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      SCOPED_TRACE(testing::Message() << c["selector"] << c["options"] << " under " << c["rule"]
                                      << ": " << c["name"] << ", " << DTypeName(dtype).data());
      RunCase(c, dtype);
    }
  }
}

TEST(ReuseOracle, CoversEveryRuleAndEveryVerdictOfItsStages) {
  std::set<std::pair<std::string, int>> seen;
  for (const json& c : ReadOracleCases("reuse.json")) {
    const bool has_stages = c["selector"] == "infinitehip";
    for (const json& step : c["replays"][0]) {
      if (step != "all" && has_stages) seen.insert({c["rule"], step[0].get<int>()});
      if (step != "all" && !has_stages) seen.insert({c["rule"], 10 + step[0].get<int>()});
    }
  }
  for (const ReuseMethod& method : ReuseMethods()) {
    const std::string name(method.name.data(), method.name.size());
    for (const int verdict : {0, 3, 10, 11}) {
      EXPECT_TRUE(seen.contains({name, verdict})) << name << " " << verdict;
    }
    for (const int verdict : {1, 2}) {
      EXPECT_EQ(seen.contains({name, verdict}), name != "cosine") << name << " " << verdict;
    }
  }
}

}  // namespace
}  // namespace kvasir::kernels
