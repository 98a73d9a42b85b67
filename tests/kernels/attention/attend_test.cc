#include "kernels/attention/attend.h"

#include <cmath>
#include <gtest/gtest.h>
#include <limits>

#include "tests/kernels/attention/attend_fixture.h"
#include "tests/kernels/attention/attend_oracle.h"

namespace kvasir::kernels {
namespace {

using Side = FakePagedKv::Side;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

INSTANTIATE_TEST_SUITE_P(Cpu, AttendTest, ::testing::ValuesIn(AttendImplementations()),
                         [](const auto& param) { return param.param.name; });

TEST_P(AttendTest, MatchesTheOracleOverShapesAndContexts) {
  for (const AttentionShape& shape : Shapes()) {
    SCOPED_TRACE(Describe(shape));
    AttentionBatch batch(shape, /*num_slots=*/4, /*max_tokens=*/300, /*seed=*/11);
    int64_t slot = 0;
    for (const int64_t context : {1, 63, 64, 65}) {
      batch.FillContext(slot, context);
      batch.AddBlock(slot++, context - 1, 1);
    }
    Run(batch);
    ExpectMatchesOracle(batch);
    if (HasFailure()) return;
  }
}

TEST_P(AttendTest, MatchesTheOracleAcrossSegments) {
  for (const DType kv : {DType::kFloat32, DType::kBFloat16}) {
    const AttentionShape shape = {.kv = kv, .kv_heads = 1, .group = 2};
    AttentionBatch batch(shape, /*num_slots=*/1, /*max_tokens=*/4200, /*seed=*/12);
    batch.FillContext(0, 4160);
    for (const int64_t context : {2047, 2048, 2049, 4096, 4100}) {
      batch.AddBlock(0, context - 1, 1);
    }
    Run(batch);
    ExpectMatchesOracle(batch);
  }
}

TEST_P(AttendTest, MatchesTheOracleForEveryNumberOfRows) {
  const AttentionShape shape = {.kv = DType::kBFloat16, .kv_heads = 2, .group = 3};
  AttentionBatch batch(shape, /*num_slots=*/1, /*max_tokens=*/320, /*seed=*/13);
  batch.FillContext(0, 320);
  for (int64_t rows = 1; rows <= 64; ++rows) batch.AddBlock(0, 256 - (rows % 3) * 64, rows);
  Run(batch);
  ExpectMatchesOracle(batch);
}

TEST_P(AttendTest, BlocksMayBeginAnywhereInAPage) {
  const AttentionShape shape = {.kv_heads = 1, .group = 1};
  AttentionBatch batch(shape, /*num_slots=*/1, /*max_tokens=*/192, /*seed=*/14);
  batch.FillContext(0, 192);
  for (const int64_t offset : {0, 1, 31, 62, 63}) {
    batch.AddBlock(0, 128 + offset, 64 - offset);
  }
  Run(batch);
  ExpectMatchesOracle(batch);
}

TEST_P(AttendTest, MatchesTheOracleOverSelections) {
  for (const AttentionShape shape :
       {AttentionShape{.kv = DType::kFloat32}, AttentionShape{.kv = DType::kBFloat16},
        AttentionShape{.activation = DType::kBFloat16, .kv = DType::kBFloat16, .head_dim = 128}}) {
    SCOPED_TRACE(Describe(shape));
    AttentionBatch batch(shape, /*num_slots=*/2, /*max_tokens=*/2304, /*seed=*/15);
    batch.FillContext(1, 2304);
    const auto add = [&](int64_t first, int64_t rows, auto make) {
      batch.AddBlock(1, first, rows, [&](int64_t) { return make(first); });
    };
    for (const int64_t rows : {1, 20, 64}) {
      const int64_t first = 2240 - (rows == 1 ? 1 : 0);
      add(first, rows, [](int64_t p) { return SelectList(0, p, {}); });         // own tokens only
      add(first, rows, [](int64_t p) { return SelectList(10, p - 100, {}); });  // sink and window
      add(first, rows, [](int64_t) { return SelectList(64, 1 << 20, {}); });    // sink only
      add(first, rows, [](int64_t) { return SelectList(0, 1 << 20, {}); });     // nothing at all
      add(first, rows, [](int64_t p) {
        return SelectList(70, p - 1, {Whole(1), Whole(17), Whole(33)});
      });
      add(first, rows, [&](int64_t p) { return ListWithHoles(p, batch.rng()); });
      add(first, rows, [](int64_t p) { return ListOfEverything(p); });
      add(first, rows, [](int64_t) {  // one token in a far page
        return SelectList(0, 1 << 20, {{.page = 20, .chosen = kWholePage, .live = 1ull << 63}});
      });
    }
    Run(batch);
    ExpectMatchesOracle(batch);
  }
}

TEST_P(AttendTest, AQueryWithoutKeysGivesZeroAndMinusInfinity) {
  AttentionBatch batch({}, 1, 128, 16);
  batch.FillContext(0, 128);
  batch.AddBlock(0, 100, 2, [](int64_t) { return SelectList(0, 1 << 20, {}); });
  Run(batch);
  for (int64_t i = 0; i < 64; ++i) EXPECT_EQ(batch.out(0, 0)[i], 0.0f);
  EXPECT_EQ(batch.lse(1, 3), -kInfinity);
}

TEST_P(AttendTest, LargeLogitsNeitherOverflowNorLoseTheWinner) {
  AttentionBatch batch({.kv = DType::kBFloat16, .kv_heads = 1, .group = 1}, 1, 300, 17);
  batch.FillContext(0, 300);
  batch.AddBlock(0, 299, 1);
  // Logits of several thousand: one winner takes all.
  for (int64_t i = 0; i < 64; ++i) batch.q(0, 0)[i] *= 3000.0f;
  Run(batch);
  ExpectMatchesOracle(batch);
}

TEST_P(AttendTest, KeysWithLogitMinusInfinityWeighNothing) {
  for (const DType activation : {DType::kFloat32, DType::kBFloat16}) {
    AttentionBatch batch({.activation = activation, .kv = DType::kBFloat16, .kv_heads = 1}, 1, 192,
                         24);
    batch.FillContext(0, 192);
    for (int64_t token = 0; token < 64; ++token) {  // the whole first page
      batch.kv().Set(batch.kv().Token(Side::kKey, 0, token, AttentionBatch::kLayer, 0), 0,
                     -kInfinity);
    }
    batch.AddBlock(0, 191, 1);
    batch.AddBlock(0, 63, 1);  // sees no other keys
    for (int64_t row = 0; row < 2; ++row) {
      for (int64_t head = 0; head < 2; ++head) batch.q(row, head)[0] = 1.0f;
    }
    Run(batch);
    EXPECT_EQ(batch.lse(1, 0), -kInfinity);
    EXPECT_EQ(batch.out(1, 1)[5], 0.0f);
    AttentionBatch without({.activation = activation, .kv = DType::kBFloat16, .kv_heads = 1}, 1,
                           192, 24);
    without.FillContext(0, 192);
    without.AddBlock(0, 191, 1, [](int64_t) { return SelectList(0, 64, {}); });
    CopyQuery(batch, 0, without, 0);
    Run(without);
    ExpectSameRow(batch, 0, without, 0);
  }
}

TEST(Attend, MatchesTheOracleWithWhateverImplementationItChooses) {
  for (const AttentionShape& shape : InvariantShapes()) {
    SCOPED_TRACE(Describe(shape));
    AttentionBatch batch(shape, 2, 200, 41);
    batch.FillContext(0, 192);
    batch.FillContext(1, 200);
    batch.AddBlock(0, 128, 64);
    batch.AddBlock(1, 199, 1);
    batch.Run([](const AttendParams& p, Executor& e) { ASSERT_TRUE(Attend(p, e).ok()); });
    ExpectMatchesOracle(batch);
  }
}

TEST(Attend, AnEmptyBatchIsFine) {
  AttentionBatch batch({}, 1, 64, 42);
  batch.Run([](const AttendParams& p, Executor& e) { EXPECT_TRUE(Attend(p, e).ok()); });
}

TEST(Attend, LseMayBeLeftOut) {
  AttentionBatch batch({}, 1, 64, 43);
  batch.FillContext(0, 64);
  batch.AddBlock(0, 0, 64);
  batch.Run([](AttendParams p, Executor& e) {
    p.lse = TensorView();
    EXPECT_TRUE(Attend(p, e).ok());
  });
  EXPECT_TRUE(std::isnan(batch.lse(0, 0)));
  EXPECT_FALSE(std::isnan(batch.out(0, 0)[0]));
}

TEST(Attend, RejectsWhatDoesNotFit) {
  AttentionBatch batch({}, 1, 128, 44);
  batch.FillContext(0, 128);
  batch.AddBlock(0, 64, 64);
  const auto code = [&](auto change) {
    absl::StatusCode found;
    batch.Run([&](AttendParams p, Executor& e) {
      change(p);
      found = Attend(p, e).code();
    });
    return found;
  };
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  EXPECT_EQ(code([](AttendParams&) {}), absl::StatusCode::kOk);
  EXPECT_EQ(code([](AttendParams& p) { p.layer = 2; }), kInvalid);
  EXPECT_EQ(code([](AttendParams& p) { p.layer = -1; }), kInvalid);
  EXPECT_EQ(code([](AttendParams& p) { p.scratch = nullptr; }), kInvalid);
  EXPECT_EQ(code([](AttendParams& p) { p.selection.num_rows = 1; }), kInvalid);
  EXPECT_EQ(code([](AttendParams& p) { p.faults = {}; }), kInvalid);
  EXPECT_EQ(code([](AttendParams& p) { p.kv.layout.head_dim = 32; }), kInvalid);
  EXPECT_EQ(code([](AttendParams& p) { p.kv.layout.num_kv_heads = 3; }), kInvalid);
  EXPECT_EQ(code([](AttendParams& p) { p.kv.layout.dtype = DType::kFloat16; }), kInvalid);
  EXPECT_EQ(code([](AttendParams& p) {
              p.out = TensorView(p.out.data(), DType::kBFloat16, {64, 4, 64});
            }),
            kInvalid);
  QueryTile tile = batch.blocks()[0];
  tile.first_position = 65;
  EXPECT_EQ(code([&](AttendParams& p) { p.tiles = {&tile, 1}; }), kInvalid);
}

}  // namespace
}  // namespace kvasir::kernels
