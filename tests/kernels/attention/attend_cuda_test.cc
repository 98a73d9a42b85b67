#include "kernels/attention/attend_cuda.h"

#include <gtest/gtest.h>
#include <limits>
#include <tuple>
#include <vector>

#include "kernels/attention/attend_cpu.h"
#include "kernels/attention/row_items.h"
#include "tests/support/attention_batch.h"
#include "tests/support/compare.h"
#include "tests/support/device_attention_batch.h"
#include "tests/support/walked_counts.h"

namespace kvasir::kernels {
namespace {

using tests::AllClose;

constexpr uint64_t kWholePage = ~uint64_t{0};

class AttendCudaTest : public testing::TestWithParam<std::tuple<int64_t, int64_t>> {
 protected:
  void SetUp() override {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
      GTEST_SKIP() << "no GPU on this machine";
    }
  }
  AttentionShape Shape() const {
    return {.activation = DType::kBFloat16,
            .kv = DType::kBFloat16,
            .head_dim = std::get<0>(GetParam()),
            .kv_heads = 2,
            .group = std::get<1>(GetParam())};
  }
};

absl::Status Decode(const AttendParams& params, const KvTensorMaps& maps) {
  const int64_t group = params.q.dim(1) / params.kv.layout.num_kv_heads;
  KVASIR_ASSIGN_OR_RETURN(const DeviceBuffer workspace,
                          DeviceBuffer::Allocate(AttendDecodeWorkspaceBytes(
                              params.kv.layout, std::ssize(params.blocks), group)));
  const std::vector<uint32_t> none(static_cast<size_t>(params.selection.num_rows));
  std::vector<uint32_t> left = none;
  DeviceMemory memory;
  KVASIR_ASSIGN_OR_RETURN(uint32_t * arrivals, memory.Copy(none.data(), none.size()));
  KVASIR_RETURN_IF_ERROR(
      AttendDecode(params, maps, workspace.data(), {arrivals, none.size()}, nullptr));
  KVASIR_RETURN_IF_ERROR(CudaStatus(cudaDeviceSynchronize(), "running the kernel"));
  KVASIR_RETURN_IF_ERROR(
      DeviceMemory::Fetch(arrivals, left.data(), left.size() * sizeof(left.front())));
  return left == none ? absl::OkStatus() : absl::InternalError("arrivals are not 0");
}

absl::Status Prefill(const AttendParams& params, const KvTensorMaps& maps) {
  return AttendPrefill(params, maps, nullptr);
}

std::vector<float> Outputs(const AttentionBatch& batch) {
  const float* first = batch.out(0, 0);
  return {first, first + batch.num_tokens() * batch.heads() * batch.shape().head_dim};
}

// Runs the reference and the device over the same batch, and compares out and lse.
void ExpectMatchesReference(AttentionBatch& batch,
                            const DeviceAttentionBatch::Implementation& implementation) {
  batch.Run(
      [](const AttendParams& params, Executor& executor) { AttendReference(params, executor); });
  const std::vector<float> expected = Outputs(batch);
  std::vector<float> expected_lse, lse;
  for (int64_t token = 0; token < batch.num_tokens(); ++token) {
    for (int64_t head = 0; head < batch.heads(); ++head) {
      expected_lse.push_back(batch.lse(token, head));
    }
  }
  const absl::Status status = DeviceAttentionBatch(batch).Run(implementation);
  ASSERT_TRUE(status.ok()) << status;
  for (int64_t token = 0; token < batch.num_tokens(); ++token) {
    for (int64_t head = 0; head < batch.heads(); ++head) lse.push_back(batch.lse(token, head));
  }
  const std::vector<int64_t> shape = {batch.num_tokens(), batch.heads(), batch.shape().head_dim};
  EXPECT_TRUE(AllClose(Outputs(batch), expected, {.absolute = 1e-2, .relative = 1e-2}, shape));
  // Rotated values are rounded, too: to a neighbour where angles differ in the last bit. With
  // grouped positions decode rotates near keys and their query to other positions at the same
  // distance.
  const double lse_error = batch.rope() == nullptr ? 1e-4 : batch.grouped().on() ? 1e-2 : 1e-3;
  EXPECT_TRUE(AllClose(lse, expected_lse, {.absolute = lse_error, .relative = 1e-5},
                       {batch.num_tokens(), batch.heads()}));
}

TEST_P(AttendCudaTest, DenseAgreesAtEveryPageEdge) {
  for (const int64_t tokens : {1, 2, 63, 64, 65, 127, 128, 129, 700, 4097}) {
    AttentionBatch batch(Shape(), 1, tokens, 7);
    batch.FillContext(0, tokens);
    batch.AddBlock(0, tokens - 1, 1);
    SCOPED_TRACE(tokens);
    ExpectMatchesReference(batch, Decode);
  }
}

TEST_P(AttendCudaTest, LongContextsAreCutIntoManyUnits) {
  const int64_t tokens = 40'000;
  ASSERT_EQ(NumDecodeUnits(NumberItems({}, tokens - 1).num_items, 2), 64);
  AttentionBatch batch(Shape(), 1, tokens, 8);
  batch.FillContext(0, tokens);
  batch.AddBlock(0, tokens - 1, 1);
  ExpectMatchesReference(batch, Decode);
}

// So many KV heads that a row is one unit: its pages go round the ring many times, and a warp has
// fewer lanes than items.
TEST_P(AttendCudaTest, AUnitMayHaveManyPages) {
  AttentionShape shape = Shape();
  shape.kv_heads = 128;
  const int64_t tokens = 1500;
  ASSERT_EQ(NumDecodeUnits(NumberItems({}, tokens - 1).num_items, shape.kv_heads), 1);
  AttentionBatch batch(shape, 1, tokens, 12);
  batch.FillContext(0, tokens);
  batch.AddBlock(0, tokens - 1, 1);
  batch.AddBlock(0, tokens - 1, 1, [&](int64_t head) {
    std::vector<SelectionEntry> entries;
    for (int64_t page = 0; page < tokens / kPageTokens; ++page) {
      const uint64_t mask =
          page % 5 == head % 5 ? kWholePage : uint64_t{0xf1} << (page + head) % 56;
      entries.push_back({.page = page, .chosen = mask, .live = mask});
    }
    return SelectList(640, tokens - 5, std::move(entries));
  });
  ExpectMatchesReference(batch, Decode);
}

TEST_P(AttendCudaTest, ListsWithMasksSinksAndWindows) {
  AttentionBatch batch(Shape(), 3, 3000, 9);
  for (int64_t slot = 0; slot < 3; ++slot) batch.FillContext(slot, 3000);
  std::mt19937_64 rng(11);
  for (int64_t slot = 0; slot < 3; ++slot) {
    batch.AddBlock(slot, 2999 - slot * 31, 1, [&](int64_t) {
      std::vector<SelectionEntry> entries;
      for (int64_t page = 0; page < 47; ++page) {
        const uint64_t mask = rng() & rng();
        if (rng() % 3 != 0) entries.push_back({.page = page, .chosen = mask, .live = mask});
      }
      return SelectList(static_cast<int64_t>(rng() % 200), 2200 + static_cast<int64_t>(rng() % 300),
                        std::move(entries));
    });
  }
  ExpectMatchesReference(batch, Decode);
}

TEST_P(AttendCudaTest, ARowWithoutKeysIsZero) {
  AttentionBatch batch(Shape(), 1, 500, 10);
  batch.FillContext(0, 500);
  batch.AddBlock(0, 499, 1, [](int64_t) { return SelectList(0, 500, {{.page = 3}}); });
  batch.AddBlock(0, 447, 1, [](int64_t) { return SelectList(0, 448, {}); });  // not even an item
  ASSERT_EQ(NumberItems(SelectList(0, 448, {}).header, 447).num_items, 0);
  ExpectMatchesReference(batch, Decode);
}

TEST_P(AttendCudaTest, PrefillBlocksAgreeAtEveryPageEdge) {
  for (const int64_t tokens : {1, 2, 63, 64, 65, 127, 128, 129, 700, 2111}) {
    AttentionBatch batch(Shape(), 1, tokens, 21);
    batch.FillContext(0, tokens);
    for (int64_t begin = std::max<int64_t>(0, tokens - 200) / 64 * 64; begin < tokens;
         begin += 64) {
      batch.AddBlock(0, begin, std::min<int64_t>(64, tokens - begin));
    }
    batch.AddBlock(0, tokens - 1, 1);
    SCOPED_TRACE(tokens);
    ExpectMatchesReference(batch, Prefill);
  }
}

TEST_P(AttendCudaTest, PrefillOverListsWithMasksSinksAndWindows) {
  AttentionBatch batch(Shape(), 2, 2000, 22);
  std::mt19937_64 rng(23);
  for (int64_t slot = 0; slot < 2; ++slot) {
    batch.FillContext(slot, 2000);
    for (const int64_t begin : std::vector<int64_t>{640, 1920 - 64 * slot}) {
      batch.AddBlock(slot, begin + slot * 3, 64 - slot * 11, [&](int64_t) {
        std::vector<SelectionEntry> entries;
        for (int64_t page = 0; page < begin / 64; ++page) {
          const uint64_t mask = rng() % 2 == 0 ? rng() & rng() : kWholePage;
          if (rng() % 3 != 0) entries.push_back({.page = page, .chosen = mask, .live = mask});
        }
        return SelectList(static_cast<int64_t>(rng() % 200),
                          begin - static_cast<int64_t>(rng() % 300), std::move(entries));
      });
    }
  }
  ExpectMatchesReference(batch, Prefill);
}

// Tokens of listed pages, by the number of the entry. From pages with few such tokens decode makes
// tiles that several pages share.
struct Pattern {
  const char* name;
  uint64_t (*mask)(int64_t entry);
};
constexpr Pattern kPatterns[] = {
    {"one token", [](int64_t i) { return uint64_t{1} << (i * 23 % 64); }},
    {"first or last token", [](int64_t i) { return uint64_t{1} << (i % 2 * 63); }},
    {"every other token", [](int64_t i) { return uint64_t{0x5555555555555555} << i % 2; }},
    {"aligned groups of 8", [](int64_t i) { return uint64_t{0xff} << (i * 5 % 8 * 8); }},
    {"groups of 8 anywhere", [](int64_t i) { return uint64_t{0xff} << (i * 13 % 57); }},
    {"half a page, and a token more", [](int64_t i) { return (uint64_t{1} << (32 + i % 2)) - 1; }},
    {"13 tokens: tiles end amid a page", [](int64_t i) { return uint64_t{0x1fff} << (i % 50); }},
    {"whole pages among single tokens",
     [](int64_t i) { return i % 3 == 0 ? kWholePage : uint64_t{1} << i % 64; }},
    {"nothing among groups of 8",
     [](int64_t i) { return i % 2 == 0 ? 0 : uint64_t{0xff} << (i % 8 * 8); }},
};

// A batch with so many KV heads that units are several tiles, with the rows of a pattern.
constexpr int64_t kPatternTokens = 3200;
AttentionBatch MakePatternBatch(AttentionShape shape, int64_t slots, uint64_t seed) {
  shape.kv_heads = 16;
  AttentionBatch batch(shape, slots, kPatternTokens, seed);
  for (int64_t slot = 0; slot < slots; ++slot) batch.FillContext(slot, kPatternTokens);
  return batch;
}
RowSelection PatternList(const Pattern& pattern, int64_t head) {
  std::vector<SelectionEntry> entries;
  for (int64_t page = 2; page < 45; ++page) {
    const uint64_t mask = pattern.mask(page - 2 + head);
    entries.push_back({.page = page, .chosen = mask | mask << 1, .live = mask});
  }
  return SelectList(128, 2880, std::move(entries));
}
void AddPattern(AttentionBatch& batch, int64_t slot, const Pattern& pattern) {
  batch.AddBlock(slot, kPatternTokens - 1, 1,
                 [&](int64_t head) { return PatternList(pattern, head); });
}

TEST_P(AttendCudaTest, TokensOfManyPagesShareTiles) {
  for (const bool rotates : {false, true}) {
    AttentionBatch batch = MakePatternBatch(Shape(), 1, 41);
    if (rotates) batch.UseCompactPositions(1.25);
    for (const Pattern& pattern : kPatterns) AddPattern(batch, 0, pattern);
    SCOPED_TRACE(rotates);
    ExpectMatchesReference(batch, Decode);
  }
}

// Unattended values are NaN.
TEST_P(AttendCudaTest, TokensThatShareTilesMayLieInTheHostTier) {
  const Pattern& pattern = kPatterns[6];
  AttentionBatch batch = MakePatternBatch(Shape(), 1, 42);
  AddPattern(batch, 0, pattern);
  for (int64_t head = 0; head < batch.shape().kv_heads; ++head) {
    for (const SelectionEntry& entry : PatternList(pattern, head).entries) {
      for (int64_t t = 0; t < kPageTokens; ++t) {
        if ((entry.live >> t & 1) != 0) continue;
        for (const auto side : {FakePagedKv::Side::kKey, FakePagedKv::Side::kValue}) {
          std::byte* token =
              batch.kv().Token(side, 0, entry.page * kPageTokens + t, AttentionBatch::kLayer, head);
          batch.kv().Set(token, 5, std::numeric_limits<float>::quiet_NaN());
        }
      }
      if (entry.page % 2 == 0) continue;
      batch.kv().SetTier(0, entry.page, AttentionBatch::kLayer, head, PageTier::kHost);
    }
  }
  ExpectMatchesReference(batch, Decode);
}

// Absent pages are left out, and the other rows keep their bits.
TEST_P(AttendCudaTest, AbsentPagesAmongTokensThatShareTiles) {
  AttentionBatch batch = MakePatternBatch(Shape(), 2, 43);
  for (int64_t slot = 0; slot < 2; ++slot) AddPattern(batch, slot, kPatterns[3]);
  ASSERT_TRUE(DeviceAttentionBatch(batch).Run(Decode).ok());
  const std::vector<float> all = Outputs(batch);
  batch.kv().SetTier(1, 7, AttentionBatch::kLayer, 0, PageTier::kAbsent);
  ASSERT_TRUE(DeviceAttentionBatch(batch).Run(Decode).ok());
  EXPECT_EQ(batch.fault(0), 0);
  EXPECT_EQ(batch.fault(1), 1);
  const std::vector<float> rest = Outputs(batch);
  EXPECT_TRUE(std::equal(all.begin(), all.begin() + std::ssize(all) / 2, rest.begin()));
  EXPECT_TRUE(std::all_of(rest.begin(), rest.end(), [](float x) { return std::isfinite(x); }));
}

// A list with pruned tokens that reaches into sink and window.
RowSelection RandomList(std::mt19937_64& rng, int64_t position) {
  std::vector<SelectionEntry> entries;
  for (int64_t page = 0; page <= position / kPageTokens; ++page) {
    const uint64_t chosen = rng() % 2 == 0 ? rng() | rng() : kWholePage;
    if (rng() % 3 == 0) continue;
    entries.push_back(
        {.page = page, .chosen = chosen, .live = rng() % 3 == 0 ? chosen & rng() : chosen});
  }
  return SelectList(static_cast<int64_t>(rng() % 200),
                    position - 63 - static_cast<int64_t>(rng() % 300), std::move(entries));
}

// Adds one token for each of three texts, with lists.
void AddTokensWithLists(AttentionBatch& batch) {
  for (int64_t slot = 0; slot < 3; ++slot) {
    batch.FillContext(slot, 3000);
    const int64_t position = 2999 - slot * 31;
    batch.AddBlock(slot, position, 1, [&](int64_t) { return RandomList(batch.rng(), position); });
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
      std::byte* key =
          batch.kv().Token(FakePagedKv::Side::kKey, 0, other, AttentionBatch::kLayer, head);
      batch.kv().Set(key, 3, std::numeric_limits<float>::quiet_NaN());
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
    const QueryBlock& block = params.blocks[static_cast<size_t>(row / heads)];
    for (int64_t query = block.first_position; query < block.first_position + block.num_rows;
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
                    .Run([](AttendParams params, const KvTensorMaps& maps) {
                      const int64_t heads = params.kv.layout.num_kv_heads;
                      params.blocks = params.blocks.subspan(1);
                      params.selection =
                          params.selection.Rows(heads, std::ssize(params.blocks) * heads);
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
        std::byte* token =
            batch.kv().Token(side, 0, page * kPageTokens + t, AttentionBatch::kLayer, head);
        batch.kv().Set(token, 5, std::numeric_limits<float>::quiet_NaN());
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
    const int64_t index = kv.row(0, of_page) * kv.layout.pages_per_block() +
                          kv.layout.page_in_block(AttentionBatch::kLayer, 0);
    return device.missed_bytes()[static_cast<size_t>(index)];
  };
  const auto times = static_cast<uint32_t>((Shape().group + 1) / 2);  // two heads at a time
  EXPECT_EQ(missed(page - 3), times * kv.layout.page_bytes());
  EXPECT_EQ(missed(page), 2 * times * kv.layout.page_bytes());
  EXPECT_EQ(missed(page + 1), times * kv.layout.page_bytes());
}

TEST_P(AttendCudaTest, PagesMayLieInTheHostTierAndAreRecorded) {
  AttentionBatch batch(Shape(), 1, 1000, 12);
  batch.FillContext(0, 1000);
  batch.kv().SetTier(0, 5, AttentionBatch::kLayer, 1, PageTier::kHost);
  batch.AddBlock(0, 999, 1);
  ExpectMatchesReference(batch, Decode);
  DeviceAttentionBatch device(batch);
  ASSERT_TRUE(device.Run(Decode).ok());
  const PagedKv kv = batch.kv().View();
  const int64_t layer_page = kv.layout.page_in_block(AttentionBatch::kLayer, 1);
  int64_t touched = 0;
  for (size_t page = 0; page < device.missed_bytes().size(); ++page) {
    const bool missed =
        static_cast<int64_t>(page) == kv.row(0, 5) * kv.layout.pages_per_block() + layer_page;
    EXPECT_EQ(device.missed_bytes()[page], missed ? kv.layout.page_bytes() : 0) << page;
    touched += device.last_touched()[page] == *kv.accesses.step ? 1 : 0;
  }
  EXPECT_EQ(touched, 16 * 2);  // pages of two KV heads
}

// From a page with few attended tokens only these are read, and counted.
TEST_P(AttendCudaTest, ListsOfSingleTokensReadTheseTokens) {
  AttentionBatch batch(Shape(), 1, 6400, 16);
  batch.FillContext(0, 6400);
  constexpr int64_t kHostPage = 9;
  batch.kv().SetTier(0, kHostPage, AttentionBatch::kLayer, 1, PageTier::kHost);
  const auto single_tokens = [&](int64_t) {
    std::vector<SelectionEntry> entries;
    for (int64_t page = 2; page < 96; ++page) {
      uint64_t mask = uint64_t{1} << (page * 7 % 64);
      if (page % 3 == 0) mask |= uint64_t{1} << (page * 11 % 64);
      if (page % 10 == 0) mask |= uint64_t{0x0101010101010101};
      if (page == kHostPage) mask = (uint64_t{1} << 17) | (uint64_t{3} << 40);
      entries.push_back({.page = page, .chosen = mask, .live = mask});
    }
    return SelectList(70, 6200, std::move(entries));
  };
  batch.AddBlock(0, 6399, 1, single_tokens);
  ExpectMatchesReference(batch, Decode);
  DeviceAttentionBatch device(batch);
  ASSERT_TRUE(device.Run(Decode).ok());
  const PagedKv kv = batch.kv().View();
  const int64_t missed = kv.row(0, kHostPage) * kv.layout.pages_per_block() +
                         kv.layout.page_in_block(AttentionBatch::kLayer, 1);
  EXPECT_EQ(device.missed_bytes()[static_cast<size_t>(missed)], 2 * 3 * kv.layout.row_bytes());
}

TEST_P(AttendCudaTest, AbsentPagesSetTheFaultOfTheirSlotOnly) {
  AttentionBatch batch(Shape(), 2, 300, 13);
  for (int64_t slot = 0; slot < 2; ++slot) {
    batch.FillContext(slot, 300);
    batch.AddBlock(slot, 299, 1);
  }
  batch.kv().SetTier(1, 2, AttentionBatch::kLayer, 0, PageTier::kAbsent);
  ASSERT_TRUE(DeviceAttentionBatch(batch).Run(Decode).ok());
  EXPECT_EQ(batch.fault(0), 0);
  EXPECT_EQ(batch.fault(1), 1);
}

// Units of several tiles, and several units for a CTA.
TEST_P(AttendCudaTest, ARowHasTheSameBitsAloneAndAmongOthers) {
  constexpr int64_t kRows = 4;
  const int64_t tokens = 2500;
  AttentionShape shape = Shape();
  shape.kv_heads = 16;
  AttentionBatch batch(shape, kRows, tokens, 14);
  for (int64_t slot = 0; slot < kRows; ++slot) {
    batch.FillContext(slot, tokens);
    const int64_t position = tokens - 1 - slot * 100;
    if (slot % 2 == 0) {
      batch.AddBlock(slot, position, 1);
    } else {
      batch.AddBlock(slot, position, 1, [&](int64_t) { return RandomList(batch.rng(), position); });
    }
  }
  ASSERT_TRUE(DeviceAttentionBatch(batch).Run(Decode).ok());
  const std::vector<float> together = Outputs(batch);
  ASSERT_TRUE(DeviceAttentionBatch(batch)
                  .Run([](AttendParams params, const KvTensorMaps& maps) -> absl::Status {
                    const int64_t heads = params.kv.layout.num_kv_heads;
                    for (size_t row = 0; row < kRows; ++row) {
                      AttendParams alone = params;
                      alone.blocks = params.blocks.subspan(row, 1);
                      alone.selection =
                          params.selection.Rows(static_cast<int64_t>(row) * heads, heads);
                      KVASIR_RETURN_IF_ERROR(Decode(alone, maps));
                    }
                    return absl::OkStatus();
                  })
                  .ok());
  EXPECT_EQ(together, Outputs(batch));
}

TEST_P(AttendCudaTest, CountsWhatRowsAttendTo) {
  constexpr int64_t kRows = 6;
  const int64_t tokens = 2500;
  AttentionBatch batch(Shape(), 1, tokens, 15);
  batch.FillContext(0, tokens);
  batch.AddBlock(0, 40, 1);  // one unit
  for (int64_t row = 0; row < kRows; ++row) {
    const int64_t position = tokens - 1 - row * 100;
    if (row == 2) {
      batch.AddBlock(0, position, 1);
      continue;
    }
    batch.AddBlock(0, position, 1, [&](int64_t) {
      RowSelection list = RandomList(batch.rng(), position);
      for (size_t i = 5; i < list.entries.size(); i += 4) list.entries[i].live = 0;
      return list;
    });
  }
  const std::vector<SelectedCounts> expected = tests::WalkedCounts(batch);
  std::vector<SelectedCounts> found(expected.size(), {.pages = -1, .unread_pages = -1});
  const absl::Status status = DeviceAttentionBatch(batch).Run(
      [&](AttendParams params, const KvTensorMaps& maps) -> absl::Status {
        DeviceMemory memory;
        KVASIR_ASSIGN_OR_RETURN(SelectedCounts * counts, memory.Copy(found.data(), found.size()));
        params.device_counts = {counts, found.size()};
        KVASIR_RETURN_IF_ERROR(Decode(params, maps));
        return DeviceMemory::Fetch(counts, found.data(), found.size() * sizeof(SelectedCounts));
      });
  ASSERT_TRUE(status.ok()) << status;
  for (size_t row = 0; row < found.size(); ++row) {
    EXPECT_TRUE(tests::AreSame(found[row], expected[row])) << row;
    EXPECT_EQ(expected[row].pruned_pages > 0, expected[row].is_list != 0) << "a premise";
  }
}

TEST(AttendCudaParams, ATerminatorIsRefused) {
  const Termination termination;
  AttendParams params;
  params.terminations = std::span(&termination, 1);
  const absl::Status status = AttendDecode(params, KvTensorMaps{}, nullptr, {}, nullptr);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_NE(status.message().find("no terminations"), absl::string_view::npos);
}

TEST(AttendCudaParams, GroupedPositionsNeedUnrotatedKeys) {
  const AttentionShape shape = {.activation = DType::kBFloat16, .kv = DType::kBFloat16};
  AttentionBatch batch(shape, 1, 64, 1);
  batch.FillContext(0, 64);
  batch.AddBlock(0, 63, 1);
  AttendParams params;
  batch.Run([&](const AttendParams& of_batch, Executor&) { params = of_batch; });
  params.grouped = {.group_size = 8, .window = 1024};
  for (const absl::Status& status : {AttendDecode(params, KvTensorMaps{}, nullptr, {}, nullptr),
                                     AttendPrefill(params, KvTensorMaps{}, nullptr)}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("grouped positions need device_rope"), absl::string_view::npos);
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, AttendCudaTest,
                         testing::Combine(testing::Values(64, 128),
                                          testing::Values(1, 2, 4, 7, 8)));

}  // namespace
}  // namespace kvasir::kernels
