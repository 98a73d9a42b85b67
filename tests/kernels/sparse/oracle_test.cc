// Every selector against the independent definitions of oracle.py, which recorded what must be
// chosen. Keys and queries are those of oracle.py: multiples of 1/8, whose sums are exact.
#include <cstdint>
#include <gtest/gtest.h>
#include <memory>
#include <string>
#include <vector>

#include "nlohmann/json.hpp"

#include "kernels/paged/compact_positions.h"
#include "kernels/sparse/methods.h"
#include "kernels/sparse/policy.h"
#include "kernels/sparse/top_p/top_p_pruner.h"
#include "tests/kernels/sparse/oracle_batch.h"

namespace kvasir::kernels {
namespace {

using nlohmann::json;
using Kind = SelectionHeader::Kind;

// Prunes, and compares what is left; what lies in sink or window stays as it was.
void ExpectPruned(const json& c, const std::vector<PolicyNumbers>& numbers, AttentionBatch& batch,
                  PageSelection& selection) {
  SerialExecutor executor;
  AssignPositions(selection);
  const absl::Status status =
      TopPPruner().Prune(batch.ParamsForSelect(numbers), selection, executor);
  ASSERT_TRUE(status.ok()) << status;
  for (int64_t head = 0; head < kKvHeads; ++head) {
    const SelectionHeader& header = selection.header(head);
    const SelectionEntry* list = selection.list(head);
    EXPECT_EQ(ListedRanges(header, list, &SelectionEntry::live, Within::kSparseRange),
              c["live"][static_cast<size_t>(head)].get<Ranges>())
        << "KV head " << head;
    EXPECT_EQ(ListedRanges(header, list, &SelectionEntry::chosen, Within::kAll),
              c["chosen"][static_cast<size_t>(head)].get<Ranges>());
    for (int32_t i = 0; i < header.count; ++i) {
      const int64_t start = list[i].page * kPageTokens;
      const uint64_t sparse = TokenMask(header.sink_end - start, header.window_begin - start);
      EXPECT_EQ(list[i].live & ~sparse, list[i].chosen & ~sparse);
    }
  }
}

void RunCase(const json& c, DType dtype) {
  const int64_t context = c["first"].get<int64_t>() + c["rows"].get<int64_t>();
  AttentionBatch batch({.activation = dtype,
                        .kv = dtype,
                        .head_dim = kDim,
                        .kv_heads = kKvHeads,
                        .group = c["group"],
                        .layer = c["layer"]},
                       1, context, 1);
  if (c["unrotated"]) batch.UseCompactPositions(/*attention_scaling=*/1.1);
  ASSERT_NO_FATAL_FAILURE(FillKeys(c, context, batch));
  FillQueries(c, batch);
  const std::vector<PolicyNumbers> numbers = {{.sink_tokens = c["sink"],
                                               .window_tokens = c["window"],
                                               .budget_tokens = c["budget"],
                                               .top_p = c["top_p"]}};
  MethodOptions options;
  for (const auto& [name, value] : c["options"].items()) options.push_back({name, value});
  const std::unique_ptr<Selector> selector =
      MakeSelector(c["selector"].get<std::string>(), options).value();
  PageSelection selection = batch.MakeSelection(selector->MaxEntries(numbers[0], context));
  SerialExecutor executor;
  const absl::Status status = selector->Select(batch.ParamsForSelect(numbers), selection, executor);
  ASSERT_TRUE(status.ok()) << status;
  for (int64_t head = 0; head < kKvHeads; ++head) {
    const json& expected = c["chosen"][static_cast<size_t>(head)];
    ASSERT_EQ(selection.header(head).kind == Kind::kAll, expected.is_null());
    if (expected.is_null()) continue;
    EXPECT_EQ(ListedRanges(selection.header(head), selection.list(head), &SelectionEntry::chosen,
                           Within::kAll),
              expected.get<Ranges>())
        << "KV head " << head;
  }
  if (c.contains("live")) ExpectPruned(c, numbers, batch, selection);
}

TEST(SelectorOracle, ChoosesWhatTheDefinitionChooses) {
  const json cases = ReadOracleCases("selections.json");
  ASSERT_GE(cases.size(), 185u);
  for (const json& c : cases) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      SCOPED_TRACE(testing::Message() << c["selector"] << c["options"] << ": " << c["name"] << ", "
                                      << DTypeName(dtype).data());
      RunCase(c, dtype);
    }
  }
}

TEST(SelectorOracle, CoversEverySelectorThatLists) {
  const json cases = ReadOracleCases("selections.json");
  for (const SelectorMethod& method : SelectorMethods()) {
    if (method.name == "all" || method.name == "streaming") continue;
    int lists = 0;
    for (const json& c : cases) {
      const std::string name(method.name.data(), method.name.size());
      if (c["selector"] == name && !c["chosen"][0].empty()) ++lists;
    }
    EXPECT_GE(lists, 9) << method.name;
  }
}

}  // namespace
}  // namespace kvasir::kernels
