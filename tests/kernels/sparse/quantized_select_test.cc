// Over quantized KV every selector chooses what it chooses over bfloat16 KV that holds the decoded
// elements.
#include <gtest/gtest.h>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/sparse/methods.h"
#include "kernels/sparse/policy.h"
#include "tests/support/attention_batch.h"
#include "tests/support/sparse_methods.h"

namespace kvasir::kernels {
namespace {

using Side = FakePagedKv::Side;

constexpr int64_t kContext = 2100;

class QuantizedSelectTest : public ::testing::TestWithParam<std::tuple<std::string, DType, bool>> {
 protected:
  std::string name() const { return std::get<0>(GetParam()); }
  AttentionShape shape(DType kv) const {
    return {.activation = DType::kBFloat16, .kv = kv, .head_dim = 64, .kv_heads = 2, .group = 2};
  }
  void Prepare(AttentionBatch& batch) const {
    if (std::get<2>(GetParam())) batch.UseCompactPositions();
    batch.FillContext(0, kContext);
    batch.AddBlock(0, kContext - 30, 16);
    for (int64_t position = kContext - 8; position < kContext; ++position) {
      batch.AddBlock(0, position, 1);
    }
  }
  // The same keys and values, as bfloat16.
  void CopyDecoded(AttentionBatch& from, AttentionBatch& to) const {
    for (int64_t t = 0; t < kContext; ++t) {
      for (int64_t head = 0; head < 2; ++head) {
        for (const Side side : {Side::kKey, Side::kValue}) {
          to.kv().SetToken(side, 0, t, AttentionBatch::kLayer, head,
                           from.kv().Elements(side, 0, t, AttentionBatch::kLayer, head));
        }
      }
    }
    for (int64_t begin = 0; begin < kContext; begin += kPageTokens) {
      const int64_t tokens = std::min(kPageTokens, kContext - begin);
      ASSERT_TRUE(RebuildBounds(to.kv().View(), 0, begin / kPageTokens, tokens).ok());
      ASSERT_TRUE(RebuildKeyCodes(to.kv().View(), 0, begin / kPageTokens, tokens).ok());
    }
  }

  // What was listed for each row, with scores.
  using Listed = std::tuple<int64_t, int64_t, uint64_t, int32_t, float>;  // row, page, tokens, ...
  std::vector<Listed> Choose(AttentionBatch& batch) const {
    const std::unique_ptr<Selector> selector = MakeSelector(name()).value();
    PolicyNumbers one = {16, 70, 300};
    one.window_tokens = std::max(one.window_tokens, selector->MinWindowTokens());
    const std::vector<PolicyNumbers> numbers(batch.blocks().size(), one);
    PageSelection out = batch.MakeSelection(selector->MaxEntries(one, kContext));
    SerialExecutor executor;
    EXPECT_TRUE(selector->Select(batch.ParamsForSelect(numbers), out, executor).ok());
    if (batch.rope() != nullptr) AssignPositions(out);
    std::vector<Listed> listed;
    for (int64_t row = 0; row < out.num_rows; ++row) {
      for (int32_t i = 0; i < out.header(row).count; ++i) {
        const SelectionEntry& entry = out.list(row)[i];
        listed.emplace_back(row, entry.page, entry.chosen, entry.pos0, entry.score);
      }
    }
    return listed;
  }
};

std::string NameOfCase(const ::testing::TestParamInfo<std::tuple<std::string, DType, bool>>& test) {
  const auto& [name, dtype, compact] = test.param;
  return name + "_" + DTypeName(dtype).data() + (compact ? "_compact" : "");
}

INSTANTIATE_TEST_SUITE_P(Selectors, QuantizedSelectTest,
                         ::testing::Combine(::testing::ValuesIn(NamesOf(SelectorMethods())),
                                            ::testing::Values(DType::kFloat8E4M3, DType::kInt8),
                                            ::testing::Bool()),
                         NameOfCase);

TEST_P(QuantizedSelectTest, ChoosesByTheDecodedKeys) {
  AttentionBatch quantized(shape(std::get<1>(GetParam())), 1, kContext, 61);
  AttentionBatch decoded(shape(DType::kBFloat16), 1, kContext, 61);
  Prepare(quantized);
  Prepare(decoded);
  const std::vector<Listed> before = Choose(decoded);
  CopyDecoded(quantized, decoded);
  const std::vector<Listed> found = Choose(quantized);
  EXPECT_EQ(found, Choose(decoded));
  EXPECT_EQ(!found.empty(), name() != "all" && name() != "streaming");
  if (found.empty()) return;
  EXPECT_NE(before, found) << "keys that were never coded are chosen alike: this shows nothing";
}

}  // namespace
}  // namespace kvasir::kernels
