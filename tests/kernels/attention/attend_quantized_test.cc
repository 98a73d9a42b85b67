// Attention over quantized KV has the bits of attention over bfloat16 KV that holds the decoded
// elements: for every implementation, shape, selection and form of positions.
#include <random>
#include <vector>

#include "tests/kernels/attention/attend_fixture.h"

namespace kvasir::kernels {
namespace {

using Side = FakePagedKv::Side;

class QuantizedAttendTest : public AttendTest {
 protected:
  // Two sequences, one of them with a single token in its last page; a prompt's tile, a decode row
  // over everything, and rows with holes. An outlier and a NaN are among what some rows attend to.
  static void Fill(AttentionBatch& batch) {
    constexpr int64_t kContext = 64 * 20 + 1;
    batch.FillContext(0, kContext);
    batch.FillContext(1, 50);
    std::mt19937_64 rng(9);
    batch.AddBlock(0, kContext - 1, 1);
    batch.AddBlock(0, kContext - 20, 19);
    batch.AddBlock(1, 0, 50);
    for (int i = 0; i < 3; ++i) {
      batch.AddBlock(0, kContext - 1 - i, 1,
                     [&](int64_t) { return ListWithHoles(kContext - 1 - i, rng); });
    }
  }
  static AttentionBatch Decoded(const AttentionShape& shape, AttentionBatch& quantized) {
    AttentionShape wide = shape;
    wide.kv = DType::kBFloat16;
    AttentionBatch batch(wide, 2, 64 * 21, 31);
    Fill(batch);
    for (const auto& [slot, tokens] : {std::pair<int64_t, int64_t>{0, 64 * 20 + 1}, {1, 50}}) {
      for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t head = 0; head < shape.kv_heads; ++head) {
          for (const Side side : {Side::kKey, Side::kValue}) {
            batch.kv().SetToken(side, slot, t, shape.layer, head,
                                quantized.kv().Elements(side, slot, t, shape.layer, head));
          }
        }
      }
    }
    return batch;
  }
  // REQUIRES: `prepare` does the same to both batches.
  void ExpectSameBitsAsDecoded(const std::function<void(AttentionBatch&)>& prepare) {
    for (const DType kv : {DType::kFloat8E4M3, DType::kInt8}) {
      for (AttentionShape shape : InvariantShapes()) {
        if (shape.kv != DType::kBFloat16) continue;
        shape.kv = kv;
        SCOPED_TRACE(Describe(shape));
        AttentionBatch quantized(shape, 2, 64 * 21, 31);
        Fill(quantized);
        AttentionBatch decoded = Decoded(shape, quantized);
        prepare(quantized);
        prepare(decoded);
        Run(quantized);
        Run(decoded);
        for (int64_t row = 0; row < quantized.num_tokens(); ++row) {
          ExpectSameRow(quantized, row, decoded, row);
        }
      }
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Implementations, QuantizedAttendTest,
                         ::testing::ValuesIn(AttendImplementations()),
                         [](const auto& test) { return test.param.name; });

TEST_P(QuantizedAttendTest, HasTheBitsOfTheDecodedElements) {
  ExpectSameBitsAsDecoded([](AttentionBatch&) {});
}

TEST_P(QuantizedAttendTest, AtCompactPositions) {
  ExpectSameBitsAsDecoded([](AttentionBatch& batch) { batch.UseCompactPositions(1.1); });
}

TEST_P(QuantizedAttendTest, AtGroupedPositions) {
  ExpectSameBitsAsDecoded(
      [](AttentionBatch& batch) { batch.UseGroupedPositions({.group_size = 3, .window = 100}); });
}

TEST_P(QuantizedAttendTest, InALayerWithAWindow) {
  ExpectSameBitsAsDecoded([](AttentionBatch& batch) { batch.UseWindow(131); });
}

// The bytes that a row misses are those of the codes.
TEST_P(QuantizedAttendTest, MissesAreCountedInStoredBytes) {
  const AttentionShape shape = {.kv = DType::kInt8, .head_dim = 64, .kv_heads = 1, .group = 1};
  AttentionBatch batch(shape, 1, 128, 4);
  batch.FillContext(0, 128);
  batch.kv().SetTier(0, 0, shape.layer, 0, PageTier::kHost);
  batch.AddBlock(0, 127, 1);
  Run(batch);
  EXPECT_EQ(batch.kv().missed_bytes(0, 0, shape.layer, 0), 64 * 2 * (64 + 1u));
}

// A token that is not finite makes the rows that attend to it NaN, and no other.
TEST_P(QuantizedAttendTest, ANanTokenMakesItsRowsNan) {
  for (const Side side : {Side::kKey, Side::kValue}) {
    const AttentionShape shape = {.kv = DType::kFloat8E4M3, .head_dim = 64, .kv_heads = 1};
    AttentionBatch batch(shape, 1, 128, 4);
    batch.FillContext(0, 100);
    std::vector<float> token(64, 1.0f);
    token[7] = std::numeric_limits<float>::infinity();
    batch.kv().SetToken(side, 0, 70, shape.layer, 0, token);
    batch.AddBlock(0, 69, 1);
    batch.AddBlock(0, 70, 1);
    Run(batch);
    EXPECT_FALSE(std::isnan(batch.out(0, 0)[0]));
    EXPECT_TRUE(std::isnan(batch.out(1, 0)[0]));
  }
}

}  // namespace
}  // namespace kvasir::kernels
