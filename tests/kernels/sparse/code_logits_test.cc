#include "kernels/sparse/key_logits/code_logits.h"

#include <cmath>
#include <cstddef>
#include <gtest/gtest.h>
#include <limits>
#include <vector>

#include "kernels/append/key_codes.h"
#include "kernels/sparse/key_logits/key_logits.h"
#include "tests/support/attention_batch.h"

namespace kvasir::kernels {
namespace {

constexpr int64_t kContext = 200;

// A row's queries over the codes of its KV head.
class CodeLogitsTest : public ::testing::TestWithParam<int64_t> {
 protected:
  CodeLogitsTest() {
    batch_.FillContext(0, kContext);
    batch_.AddBlock(0, kContext - 1, 1);
    selection_ = batch_.MakeSelection(1);
  }

  // [G, kTileKeys], of the second KV head.
  std::vector<float> Logits(int64_t page) {
    const std::vector<PolicyNumbers> numbers(1);
    const SelectParams params = batch_.ParamsForSelect(numbers);
    const SelectRow row(params, selection_, 1);
    ScratchPieces counted(nullptr);
    (void)CodeLogits::Memory(counted, params);
    std::vector<std::byte> memory(static_cast<size_t>(counted.bytes() + 64));
    ScratchPieces pieces(memory.data());
    queries_.assign(static_cast<size_t>(row.group * GetParam()), 0.0f);
    for (int64_t g = 0; g < row.group; ++g) {
      LoadQuery(row, 0, g, queries_.data() + g * GetParam());
    }
    const CodeLogits codes(row, queries_.data(), CodeLogits::Memory(pieces, params));
    EXPECT_TRUE(codes.Has(page));
    std::vector<float> logits(static_cast<size_t>(row.group * kTileKeys));
    codes.Logits(page, logits.data());
    return logits;
  }

  AttentionBatch batch_{{.head_dim = GetParam()}, 1, kContext, 41};
  PageSelection selection_;
  std::vector<float> queries_;
};

INSTANTIATE_TEST_SUITE_P(HeadDims, CodeLogitsTest, ::testing::Values(16, 64, 80, 128));

// The error of 8-bit queries is less than a tenth of that of 4-bit keys.
TEST_P(CodeLogitsTest, AreThoseOfDecodedKeys) {
  const int64_t d = GetParam();
  const PagedKv kv = batch_.kv().View();
  double coding = 0, querying = 0;
  for (int64_t page = 0; page < kContext / kPageTokens; ++page) {
    const std::vector<float> logits = Logits(page);
    for (int64_t t = 0; t < kPageTokens; ++t) {
      std::vector<float> decoded(static_cast<size_t>(d));
      DecodeKey(kv.layout, kv.KeyCodes(0, page, AttentionBatch::kLayer, 1), t, decoded.data());
      const std::byte* key = batch_.kv().Token(FakePagedKv::Side::kKey, 0, page * kPageTokens + t,
                                               AttentionBatch::kLayer, 1);
      for (int64_t g = 0; g < 2; ++g) {
        double exact = 0, coded = 0;
        for (int64_t i = 0; i < d; ++i) {
          const double q = queries_[static_cast<size_t>(g * d + i)];
          exact += q * batch_.kv().Get(key, i);
          coded += q * decoded[static_cast<size_t>(i)];
        }
        coding += (coded - exact) * (coded - exact);
        const double error = logits[static_cast<size_t>(g * kTileKeys + t)] - coded;
        querying += error * error;
      }
    }
  }
  EXPECT_GT(coding, 0);
  EXPECT_LT(std::sqrt(querying), 0.1 * std::sqrt(coding));
}

TEST_P(CodeLogitsTest, ANanStaysInItsQuery) {
  batch_.q(0, 2)[5] = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> logits = Logits(1);
  for (size_t t = 0; t < kTileKeys; ++t) {
    EXPECT_TRUE(std::isnan(logits[t]));
    EXPECT_FALSE(std::isnan(logits[kTileKeys + t]));
  }
}

TEST_P(CodeLogitsTest, AQueryOfZerosHasZeroLogits) {
  std::fill_n(batch_.q(0, 3), GetParam(), 0.0f);
  const std::vector<float> logits = Logits(2);
  for (size_t t = 0; t < kTileKeys; ++t) EXPECT_EQ(logits[kTileKeys + t], 0.0f);
}

}  // namespace
}  // namespace kvasir::kernels
