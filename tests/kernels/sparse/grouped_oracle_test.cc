// Attention at grouped positions against the independent definition in grouped_oracle.py: the
// output, by every implementation and after every selector.
#include <algorithm>
#include <cstdint>
#include <gtest/gtest.h>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "nlohmann/json.hpp"

#include "kernels/sparse/methods.h"
#include "kernels/sparse/policy.h"
#include "tests/kernels/sparse/oracle_batch.h"
#include "tests/kernels/sparse/oracle_values.h"
#include "tests/support/attend_implementations.h"
#include "tests/support/compare.h"

namespace kvasir::kernels {
namespace {

using nlohmann::json;

constexpr int64_t kOutDim = 64;  // head_dim, as fast implementations want it

void FillValues(const json& c, int64_t context, AttentionBatch& batch) {
  for (int64_t head = 0; head < kKvHeads; ++head) {
    for (int64_t t = 0; t < context; ++t) {
      std::byte* value =
          batch.kv().Token(FakePagedKv::Side::kValue, 0, t, batch.shape().layer, head);
      for (int64_t i = 0; i < kOutDim; ++i) {
        batch.kv().Set(value, i, OracleValue(c["seed"], OracleSide::kValue, t, head, i));
      }
    }
  }
}

void Select(const json& c, int64_t context, AttentionBatch& batch) {
  const std::vector<PolicyNumbers> numbers = {
      {.sink_tokens = c["sink"], .window_tokens = c["window"], .budget_tokens = c["budget"]}};
  const std::unique_ptr<Selector> selector =
      MakeSelector(c["selector"].get<std::string>(), {}).value();
  const int64_t capacity = selector->MaxEntries(numbers[0], context);
  PageSelection selection = batch.MakeSelection(capacity);
  SerialExecutor executor;
  ASSERT_TRUE(selector->Select(batch.ParamsForSelect(numbers), selection, executor).ok());
  batch.SetSelections({selection.headers, selection.headers + kKvHeads},
                      {selection.entries, selection.entries + kKvHeads * capacity});
}

void ExpectOut(const json& c, const AttentionBatch& batch) {
  const int64_t group = batch.shape().group;
  const bool bf16 = batch.shape().activation == DType::kBFloat16;
  for (int64_t r = 0; r < c["rows"].get<int64_t>(); ++r) {
    for (int64_t head = 0; head < batch.heads(); ++head) {
      const std::vector<double> expected =
          c["out"][static_cast<size_t>(head / group)][static_cast<size_t>(r)]
           [static_cast<size_t>(head % group)];
      const float* out = batch.out(r, head);
      // Rotated keys and queries are rounded to bfloat16, which moves logits of 10 by hundredths.
      EXPECT_TRUE(tests::AllClose(std::vector<float>(out, out + kOutDim), expected,
                                  {.absolute = bf16 ? 5e-2 : 3e-5, .relative = bf16 ? 5e-2 : 0}))
          << "query " << r << ", head " << head;
    }
  }
}

void RunCase(const json& c, DType dtype, const AttendImplementation& implementation) {
  const int64_t context = c["first"].get<int64_t>() + c["rows"].get<int64_t>();
  AttentionBatch batch({.activation = dtype,
                        .kv = dtype,
                        .head_dim = kOutDim,
                        .kv_heads = kKvHeads,
                        .group = c["group"]},
                       1, context, 1);
  batch.UseGroupedPositions({.group_size = c["group_size"], .window = c["near"]},
                            /*attention_scaling=*/1.1);
  ASSERT_NO_FATAL_FAILURE(FillKeys(c, context, batch));
  FillValues(c, context, batch);
  FillQueries(c, batch);
  ASSERT_NO_FATAL_FAILURE(Select(c, context, batch));
  batch.Run(implementation.run);
  ExpectOut(c, batch);
}

TEST(GroupedOracle, GivesOutWhatTheDefinitionGivesOut) {
  const json cases = ReadOracleCases("grouped.json");
  ASSERT_GE(cases.size(), 35u);
  for (const AttendImplementation& implementation : AttendImplementations()) {
    for (const json& c : cases) {
      for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
        SCOPED_TRACE(testing::Message()
                     << implementation.name << ", " << c["selector"] << ": " << c["name"]
                     << ", groups of " << c["group_size"] << " behind " << c["near"] << ", "
                     << DTypeName(dtype).data());
        RunCase(c, dtype, implementation);
      }
    }
  }
}

TEST(GroupedOracle, CoversEverySelector) {
  std::set<std::string> covered;
  for (const json& c : ReadOracleCases("grouped.json")) covered.insert(c["selector"]);
  for (const SelectorMethod& method : SelectorMethods()) {
    EXPECT_EQ(covered.count(std::string(method.name.data(), method.name.size())), 1u)
        << method.name;
  }
}

}  // namespace
}  // namespace kvasir::kernels
