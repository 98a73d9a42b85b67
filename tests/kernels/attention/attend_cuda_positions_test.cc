// Attention on the GPU at compact and grouped positions.
#include <algorithm>
#include <gtest/gtest.h>
#include <iterator>
#include <limits>
#include <utility>
#include <vector>

#include "kernels/attention/attend_cuda.h"
#include "kernels/sparse/common/selection_header.h"
#include "tests/kernels/attention/attend_cuda_fixture.h"
#include "tests/kernels/attention/attend_cuda_patterns.h"

namespace kvasir::kernels {
namespace {

// Each query of a tile has a window of its own, where the model's layer has one.
TEST_P(AttendCudaTest, PrefillWithAWindow) {
  for (const int64_t window : {1, 5, 63, 64, 65, 97, 128, 200, 447, 448}) {
    for (const bool compact : {false, true}) {
      SCOPED_TRACE(testing::Message() << "window of " << window << (compact ? ", compact" : ""));
      AttentionBatch batch(Shape(), 1, 448, 61);
      if (compact) batch.UseCompactPositions();
      batch.UseWindow(window);
      batch.FillContext(0, 448);
      for (const int64_t first : {0, 192, 320, 384}) {
        const QueryTile tile = {.num_rows = first == 320 ? 20 : 64, .first_position = first};
        batch.AddBlock(0, first, tile.num_rows, [&](int64_t) {
          const PolicyNumbers numbers = {
              .sink_tokens = 0, .window_tokens = window, .budget_tokens = 0};
          return RowSelection{.header = MakeHeader(tile, numbers), .entries = {}};
        });
      }
      ExpectMatchesReference(batch, Prefill);
    }
  }
}

// Keys cached un-rotated, each read at its position in the row.
TEST_P(AttendCudaTest, CompactPositionsOfLists) {
  AttentionBatch batch(Shape(), 3, 3000, 31);
  batch.UseCompactPositions(1.25);
  AddTokensWithLists(batch);
  ExpectMatchesReference(batch, Decode);
}

TEST_P(AttendCudaTest, CompactPositionsOfAllAreTheTokensOwn) {
  for (const int64_t tokens : {1, 65, 1000}) {
    AttentionBatch batch(Shape(), 1, tokens, 32);
    batch.UseCompactPositions();
    batch.FillContext(0, tokens);
    batch.AddBlock(0, tokens - 1, 1);
    SCOPED_TRACE(tokens);
    ExpectMatchesReference(batch, Decode);
    ExpectMatchesReference(batch, Prefill);
  }
}

TEST_P(AttendCudaTest, CompactPositionsInPrefill) {
  AttentionBatch batch(Shape(), 2, 2000, 33);
  batch.UseCompactPositions(1.25);
  for (int64_t slot = 0; slot < 2; ++slot) {
    batch.FillContext(slot, 2000);
    batch.AddBlock(slot, 1280, 64);
    const int64_t begin = 1920 - 64 * slot + slot * 3;
    batch.AddBlock(slot, begin, 64 - slot * 11,
                   [&](int64_t) { return RandomList(batch.rng(), begin); });
  }
  ExpectMatchesReference(batch, Prefill);
}

// Unattended values would be NaN.
TEST_P(AttendCudaTest, CompactPositionsOfSingleTokens) {
  AttentionBatch batch(Shape(), 1, 6400, 34);
  batch.UseCompactPositions();
  batch.FillContext(0, 6400);
  batch.AddBlock(0, 6399, 1, [&](int64_t head) {
    std::vector<SelectionEntry> entries;
    for (int64_t page = 2; page < 96; ++page) {
      const uint64_t mask = uint64_t{1} << (page * 7 % 64);
      entries.push_back({.page = page, .chosen = mask | mask << 1, .live = mask});
      const int64_t other = page * kPageTokens + (page * 7 + 2) % 64;
      Poison(batch, FakePagedKv::Side::kKey, other, head);
    }
    return SelectList(70, 6200, std::move(entries));
  });
  ExpectMatchesReference(batch, Decode);
}

// Numbers of keys that queries of the batch attend to, on both sides of the neighbourhood's start.
struct Sides {
  int64_t far = 0;
  int64_t near = 0;
};
Sides CountSides(AttentionBatch& batch) {
  Sides sides;
  const AttendParams params = batch.Params();
  const int64_t heads = batch.shape().kv_heads;
  for (int64_t row = 0; row < params.selection.num_rows; ++row) {
    const QueryTile& tile = params.tiles[static_cast<size_t>(row / heads)];
    for (int64_t query = tile.first_position; query < tile.first_position + tile.num_rows;
         ++query) {
      for (SelectedPages walk(params.selection.header(row), params.selection.list(row), query);
           walk.valid(); walk.Next()) {
        const uint64_t far = batch.grouped().FarMask(walk.page(), query);
        sides.far += CountBits(walk.mask() & far);
        sides.near += CountBits(walk.mask() & ~far);
      }
    }
  }
  return sides;
}
void ExpectMatchesReferenceOnBothSides(AttentionBatch& batch,
                                       const DeviceAttentionBatch::Implementation& implementation) {
  const GroupedPositions& grouped = batch.grouped();
  SCOPED_TRACE(testing::Message() << "groups of " << grouped.group_size << " beyond "
                                  << grouped.window);
  const Sides sides = CountSides(batch);
  EXPECT_GT(sides.near, 0) << "a premise";
  EXPECT_GT(sides.far, 0) << "a premise";
  ExpectMatchesReference(batch, implementation);
}

// Neighbourhoods that start inside pages and at their start; groups that pages cut, and groups
// longer than pages.
constexpr GroupedPositions kGroupings[] = {{1, 100}, {4, 64}, {7, 100}, {4, 30}, {90, 333}};

TEST_P(AttendCudaTest, GroupedPositionsAtEveryBeginOfTheNeighbourhood) {
  for (const GroupedPositions& grouped : kGroupings) {
    for (const int64_t begin : {1, 2, 63, 64, 65, 127, 128, 700}) {
      const int64_t tokens = begin + grouped.window;
      AttentionBatch batch(Shape(), 1, tokens, 51);
      batch.UseGroupedPositions(grouped, 1.25);
      batch.FillContext(0, tokens);
      batch.AddBlock(0, tokens - 1, 1);
      SCOPED_TRACE(tokens);
      ExpectMatchesReferenceOnBothSides(batch, Decode);
      ExpectMatchesReferenceOnBothSides(batch, Prefill);
    }
  }
}

TEST_P(AttendCudaTest, GroupedPositionsOfLists) {
  for (const GroupedPositions& grouped : kGroupings) {
    AttentionBatch batch(Shape(), 3, 3000, 52);
    batch.UseGroupedPositions(grouped);
    AddTokensWithLists(batch);
    ExpectMatchesReferenceOnBothSides(batch, Decode);
  }
}

// Tiles shared by near and far tokens.
TEST_P(AttendCudaTest, GroupedPositionsOfTokensThatShareTiles) {
  for (const GroupedPositions& grouped : {GroupedPositions{4, 1111}, GroupedPositions{7, 2048}}) {
    AttentionBatch batch = MakePatternBatch(Shape(), 1, 53);
    batch.UseGroupedPositions(grouped, 1.25);
    for (const Pattern& pattern : kPatterns) AddPattern(batch, 0, pattern);
    ExpectMatchesReferenceOnBothSides(batch, Decode);
  }
}

TEST_P(AttendCudaTest, GroupedPositionsInPrefill) {
  for (const GroupedPositions& grouped : kGroupings) {
    AttentionBatch batch(Shape(), 1, 800, 54);
    batch.UseGroupedPositions(grouped, 1.25);
    batch.FillContext(0, 800);
    batch.AddBlock(0, 384, 64);
    batch.AddBlock(0, 0, 64);  // all near, except with small windows
    batch.AddBlock(0, 64, 64);
    batch.AddBlock(0, 451, 53);
    batch.AddBlock(0, 700, 29, [&](int64_t) { return RandomList(batch.rng(), 700); });
    batch.AddBlock(0, 736, 64, [&](int64_t) { return RandomList(batch.rng(), 736); });
    ExpectMatchesReferenceOnBothSides(batch, Prefill);
  }
}

// Bit by bit in prefill and decode: the positions are the same.
TEST_P(AttendCudaTest, WithinTheNeighbourhoodPositionsAreTheTokensOwn) {
  AttentionBatch grouped(Shape(), 1, 448, 55), own(Shape(), 1, 448, 55);
  grouped.UseGroupedPositions({.group_size = 4, .window = 448});
  own.UseCompactPositions();
  for (AttentionBatch* batch : {&grouped, &own}) {
    batch->FillContext(0, 448);
    batch->AddBlock(0, 384, 64);
  }
  ASSERT_EQ(CountSides(grouped).far, 0);
  for (AttentionBatch* batch : {&grouped, &own}) {
    ASSERT_TRUE(DeviceAttentionBatch(*batch).Run(Prefill).ok());
  }
  EXPECT_EQ(Outputs(grouped), Outputs(own));
  for (AttentionBatch* batch : {&grouped, &own}) {
    for (int64_t row = 0; row < 64; row += 9) batch->AddBlock(0, 384 + row, 1);
    ASSERT_TRUE(DeviceAttentionBatch(*batch)
                    .Run([](CudaAttendParams params, const KvTensorMaps& maps) {
                      const int64_t heads = params.kv.layout.num_kv_heads;
                      params.tiles = params.tiles.subspan(1);
                      params.selection =
                          params.selection.Rows(heads, std::ssize(params.tiles) * heads);
                      return Decode(params, maps);
                    })
                    .ok());
  }
  const size_t prefilled = static_cast<size_t>(64 * own.heads() * own.shape().head_dim);
  const std::vector<float> found = Outputs(grouped), expected = Outputs(own);
  EXPECT_TRUE(std::equal(found.begin() + static_cast<std::ptrdiff_t>(prefilled), found.end(),
                         expected.begin() + static_cast<std::ptrdiff_t>(prefilled)));
}

// Neighbourhoods start at different places in each tile.
TEST_P(AttendCudaTest, AtGroupedPositionsARowHasItsBitsInAnyBlock) {
  for (const GroupedPositions& grouped : kGroupings) {
    AttentionBatch whole(Shape(), 1, 448, 56), cut(Shape(), 1, 448, 56);
    for (AttentionBatch* batch : {&whole, &cut}) {
      batch->UseGroupedPositions(grouped);
      batch->FillContext(0, 448);
    }
    whole.AddBlock(0, 384, 64);
    for (const int64_t row : {0, 7, 40})
      cut.AddBlock(0, 384 + row, (row == 0 ? 7 : row == 7 ? 33 : 24));
    for (int64_t row = 0; row < 64; ++row) {
      for (int64_t head = 0; head < whole.heads(); ++head) {
        std::copy_n(whole.q(row, head), Shape().head_dim, cut.q(row, head));
      }
    }
    EXPECT_GT(CountSides(whole).far, 0);
    for (AttentionBatch* batch : {&whole, &cut}) {
      ASSERT_TRUE(DeviceAttentionBatch(*batch).Run(Prefill).ok());
    }
    EXPECT_EQ(Outputs(whole), Outputs(cut)) << "beyond " << grouped.window;
  }
}

// On the page where a neighbourhood starts, prefill reads a page of the host tier twice, each time
// only the wanted tokens. Unattended values are NaN.
TEST_P(AttendCudaTest, GroupedPositionsOfPagesInTheHostTier) {
  const GroupedPositions grouped = {.group_size = 4, .window = 300};
  constexpr int64_t kTokens = 1000;
  AttentionBatch batch(Shape(), 1, kTokens, 57);
  batch.UseGroupedPositions(grouped);
  batch.FillContext(0, kTokens);
  const int64_t first = kTokens - 40;
  const int64_t page = (first - grouped.window) / kPageTokens;  // far for some, near for others
  constexpr uint64_t kWanted = ~uint64_t{0xff00};
  for (int64_t head = 0; head < batch.shape().kv_heads; ++head) {
    for (const int64_t other : {page - 3, page, page + 1, page + 2}) {
      batch.kv().SetTier(0, other, AttentionBatch::kLayer, head, PageTier::kHost);
    }
    for (int64_t t = 8; t < 16; ++t) {
      for (const auto side : {FakePagedKv::Side::kKey, FakePagedKv::Side::kValue}) {
        Poison(batch, side, page * kPageTokens + t, head);
      }
    }
  }
  batch.AddBlock(0, first, 40, [&](int64_t) {
    std::vector<SelectionEntry> entries;
    for (int64_t listed = 0; listed < 14; ++listed) {
      const uint64_t mask = listed == page ? kWanted : kWholePage;
      entries.push_back({.page = listed, .chosen = mask, .live = mask});
    }
    return SelectList(0, 14 * kPageTokens, std::move(entries));
  });
  ExpectMatchesReferenceOnBothSides(batch, Prefill);
  DeviceAttentionBatch device(batch);
  ASSERT_TRUE(device.Run(Prefill).ok());
  const PagedKv kv = batch.kv().View();
  const auto missed = [&](int64_t of_page) {
    const int64_t index = kv.extent(0, of_page) * kv.layout.pages_per_block() +
                          kv.layout.page_in_block(AttentionBatch::kLayer, 0);
    return device.missed_bytes()[static_cast<size_t>(index)];
  };
  const auto times = static_cast<uint32_t>((Shape().group + 1) / 2);  // two heads at a time
  EXPECT_EQ(missed(page - 3), times * kv.layout.page_bytes());
  EXPECT_EQ(missed(page), 2 * times * kv.layout.page_bytes());
  EXPECT_EQ(missed(page + 1), times * kv.layout.page_bytes());
}

}  // namespace
}  // namespace kvasir::kernels
