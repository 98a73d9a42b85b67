// Attention of a layer in which the model sees a window of tokens: every query has its own.
#include <algorithm>
#include <gtest/gtest.h>
#include <utility>
#include <vector>

#include "kernels/attention/attend.h"
#include "kernels/sparse/common/selection_header.h"
#include "tests/kernels/attention/attend_fixture.h"
#include "tests/kernels/attention/attend_oracle.h"

namespace kvasir::kernels {
namespace {

// Adds queries whose selection is that of `streaming` without a sink.
void AddQueries(AttentionBatch& batch, int64_t first, int64_t rows) {
  batch.AddBlock(0, first, rows, [&](int64_t) {
    const QueryTile tile = {.num_rows = rows, .first_position = first};
    return RowSelection{
        .header = MakeHeader(
            tile, {.sink_tokens = 0, .window_tokens = batch.window_tokens(), .budget_tokens = 0}),
        .entries = {}};
  });
}

// Windows below a page, of a page, of whole tiles, and that hold the context.
constexpr int64_t kWindows[] = {1, 5, 63, 64, 65, 97, 128, 200, 447, 448, 500};

TEST_P(AttendTest, MatchesTheOracleWithAWindow) {
  for (AttentionShape shape : Shapes()) {
    if (shape.group != 4 || shape.head_dim == 128) continue;
    shape.kv_heads = 1;
    for (const int64_t window : kWindows) {
      for (const bool compact : {false, true}) {
        SCOPED_TRACE(testing::Message() << Describe(shape) << ", window of " << window);
        AttentionBatch batch(shape, /*num_slots=*/1, /*max_tokens=*/448, /*seed=*/61);
        if (compact) batch.UseCompactPositions();
        batch.UseWindow(window);
        batch.FillContext(0, 448);
        for (const auto& [first, rows] : std::vector<std::pair<int64_t, int64_t>>{
                 {0, 64}, {192, 64}, {330, 20}, {384, 64}, {447, 1}}) {
          AddQueries(batch, first, rows);
        }
        batch.AddBlock(0, 400, 9);  // the window holds whatever the selection is
        Run(batch);
        ExpectMatchesOracle(batch);
        if (HasFailure()) return;
      }
    }
  }
}

TEST_P(AttendTest, WithAWindowARowHasItsBitsInAnyBlock) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    AttentionBatch whole({.activation = dtype, .kv = dtype}, 1, 2304, 62);
    AttentionBatch cut({.activation = dtype, .kv = dtype}, 1, 2304, 62);
    for (AttentionBatch* batch : {&whole, &cut}) {
      batch->FillContext(0, 2304);
      batch->UseWindow(333);
    }
    AddQueries(whole, 2240, 64);
    for (const auto& [begin, rows] :
         std::vector<std::pair<int64_t, int64_t>>{{0, 5}, {5, 1}, {6, 33}, {39, 2}, {41, 23}}) {
      AddQueries(cut, 2240 + begin, rows);
    }
    for (int64_t row = 0; row < 64; ++row) CopyQuery(whole, row, cut, row);
    Run(whole);
    Run(cut);
    for (int64_t row = 0; row < 64; ++row) ExpectSameRow(whole, row, cut, row);
  }
}

TEST(AttendWindow, NeedsPositionsOfTheTokensOwnOrCompactOnes) {
  AttentionBatch batch({}, 1, 128, 63);
  batch.UseGroupedPositions({.group_size = 4, .window = 64});
  batch.FillContext(0, 128);
  batch.AddBlock(0, 64, 64);
  for (const int64_t window : {0, 96, -1}) {
    batch.UseWindow(window);
    absl::Status status;
    batch.Run([&](const AttendParams& p, Executor& e) { return status = Attend(p, e); });
    EXPECT_EQ(status.ok(), window == 0) << status;
  }
}

}  // namespace
}  // namespace kvasir::kernels
