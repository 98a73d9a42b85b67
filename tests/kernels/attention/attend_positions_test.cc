// Attention at compact and grouped positions.
#include <gtest/gtest.h>
#include <vector>

#include "kernels/attention/attend.h"
#include "tests/kernels/attention/attend_fixture.h"
#include "tests/kernels/attention/attend_oracle.h"

namespace kvasir::kernels {
namespace {

using Side = FakePagedKv::Side;

// Lists whose entries reach into sink and window, with pruned tokens. Both keep their positions.
TEST_P(AttendTest, MatchesTheOracleAtCompactPositions) {
  for (const AttentionShape& shape : Shapes()) {
    if (shape.group != 1 && shape.group != 4) continue;
    SCOPED_TRACE(Describe(shape));
    AttentionBatch batch(shape, /*num_slots=*/1, /*max_tokens=*/448, /*seed=*/25);
    batch.UseCompactPositions(/*attention_scaling=*/1.1);
    batch.FillContext(0, 448);
    for (const int64_t rows : {1, 5}) {
      const int64_t first = 384 + (rows == 1 ? 63 : 0);
      const auto add = [&](auto make) {
        batch.AddBlock(0, first, rows, [&](int64_t) { return make(first); });
      };
      add([](int64_t p) { return SelectAll(p); });
      add([](int64_t p) { return SelectList(10, p - 100, {}); });
      add([](int64_t p) { return SelectList(70, p - 90, {Whole(1), Whole(3), Whole(5)}); });
      add([&](int64_t p) { return ListWithHoles(p, batch.rng()); });
      add([](int64_t p) {
        return SelectList(3, p - 1, {Whole(2), {.page = 5, .chosen = 0xf0f01, .live = 0x90001}});
      });
    }
    Run(batch);
    ExpectMatchesOracle(batch);
    if (HasFailure()) return;
  }
}

// Neighbourhoods that start in the tile's own page, in an earlier one, at a page's edge, and before
// the context; groups that cross pages.
constexpr GroupedPositions kGroupings[] = {{2, 1},   {7, 30},   {8, 64},  {3, 100},
                                           {5, 200}, {64, 333}, {4, 5000}};

TEST_P(AttendTest, MatchesTheOracleAtGroupedPositions) {
  for (AttentionShape shape : Shapes()) {
    if (shape.group != 4 || shape.activation != shape.kv || shape.head_dim == 128) continue;
    shape.kv_heads = 1;
    for (const GroupedPositions& grouped : kGroupings) {
      SCOPED_TRACE(testing::Message() << Describe(shape) << ", groups of " << grouped.group_size
                                      << " beyond " << grouped.window);
      AttentionBatch batch(shape, /*num_slots=*/1, /*max_tokens=*/320, /*seed=*/27);
      batch.UseGroupedPositions(grouped, /*attention_scaling=*/1.1);
      batch.FillContext(0, 320);
      batch.AddBlock(0, 319, 1);
      batch.AddBlock(0, 256, 20);
      batch.AddBlock(0, 256, 3, [](int64_t) { return SelectList(70, 166, {Whole(1)}); });
      batch.AddBlock(0, 300, 3, [&](int64_t) { return ListWithHoles(256, batch.rng()); });
      batch.AddBlock(0, 0, 64);
      Run(batch);
      ExpectMatchesOracle(batch);
      if (HasFailure()) return;
    }
  }
}

// A context within the neighbourhood gives the bits of attention without groups.
TEST_P(AttendTest, WithinTheNeighbourhoodPositionsAreTheTokensOwn) {
  AttentionBatch grouped({}, 1, 448, 29), own({}, 1, 448, 29);
  grouped.UseGroupedPositions({.group_size = 4, .window = 448});
  own.UseCompactPositions();
  for (AttentionBatch* batch : {&grouped, &own}) {
    batch->FillContext(0, 448);
    batch->AddBlock(0, 384, 64);
  }
  Run(grouped);
  Run(own);
  for (int64_t row = 0; row < 64; ++row) ExpectSameRow(grouped, row, own, row);
}

// The same bits as with a cache of rotated keys, so that short contexts equal those of a server
// without position extension.
TEST_P(AttendTest, AllAtCompactPositionsHasTheBitsOfRotatedKeys) {
  for (const AttentionShape& shape : Shapes()) {
    if (shape.activation != shape.kv) continue;  // q and k come from one matrix product's dtype
    SCOPED_TRACE(Describe(shape));
    AttentionBatch rotated(shape, 1, 300, 26), unrotated(shape, 1, 300, 26);
    SerialExecutor executor;
    unrotated.UseCompactPositions();
    unrotated.rope()->Reserve(300, executor);
    const auto rotate = [&](void* x, int64_t position) {
      unrotated.rope()->Rotate(x, shape.kv, 1, position);
    };
    for (AttentionBatch* batch : {&rotated, &unrotated}) {
      batch->FillContext(0, 300);
      batch->AddBlock(0, 256, 44);
      batch->AddBlock(0, 299, 1);
    }
    for (int64_t head = 0; head < shape.kv_heads; ++head) {
      for (int64_t t = 0; t < 300; ++t) {
        rotate(rotated.kv().Token(Side::kKey, 0, t, AttentionBatch::kLayer, head), t);
      }
    }
    for (int64_t row = 0; row < 45; ++row) {
      for (int64_t head = 0; head < rotated.heads(); ++head) {
        float* q = rotated.q(row, head);
        std::vector<BFloat16> narrow(q, q + shape.head_dim);
        const bool wide = shape.activation == DType::kFloat32;
        rotate(wide ? static_cast<void*>(q) : narrow.data(), row < 44 ? 256 + row : 299);
        for (size_t i = 0; !wide && i < narrow.size(); ++i) q[i] = static_cast<float>(narrow[i]);
      }
    }
    Run(rotated);
    Run(unrotated);
    for (int64_t row = 0; row < 45; ++row) ExpectSameRow(rotated, row, unrotated, row);
    if (HasFailure()) return;
  }
}

TEST_P(AttendTest, AtGroupedPositionsARowHasItsBitsInAnyBlock) {
  for (const AttentionShape& shape : InvariantShapes()) {
    if (shape.head_dim != 64) continue;
    for (const GroupedPositions& grouped : kGroupings) {
      SCOPED_TRACE(testing::Message() << Describe(shape) << ", groups of " << grouped.group_size
                                      << " beyond " << grouped.window);
      AttentionBatch prefill(shape, 1, 448, 28), decode(shape, 1, 448, 28);
      for (AttentionBatch* batch : {&prefill, &decode}) {
        batch->UseGroupedPositions(grouped);
        batch->FillContext(0, 448);
      }
      prefill.AddBlock(0, 384, 64);
      for (int64_t row = 0; row < 64; ++row) decode.AddBlock(0, 384 + row, 1);
      for (int64_t row = 0; row < 64; ++row) CopyQuery(prefill, row, decode, row);
      Run(prefill);
      Run(decode);
      for (int64_t row = 0; row < 64; ++row) ExpectSameRow(prefill, row, decode, row);
      if (HasFailure()) return;
    }
  }
}

}  // namespace
}  // namespace kvasir::kernels
