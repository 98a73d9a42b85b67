#include "kernels/attention/attend_cuda.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "kernels/attention/attend_kernel.h"
#include "kernels/base/multiprocessors.h"
#include "kernels/paged/row_items.h"
#include "tests/kernels/attention/attend_cuda_fixture.h"
#include "tests/support/case_name.h"
#include "tests/support/walked_counts.h"

namespace kvasir::kernels {
namespace {

INSTANTIATE_TEST_SUITE_P(Shapes, AttendCudaTest,
                         testing::Combine(testing::Values(64, 128),
                                          testing::Values(1, 2, 4, 7, 8, 9, 16),
                                          testing::Values(DType::kBFloat16)),
                         CaseName());
INSTANTIATE_TEST_SUITE_P(Codes, AttendCudaTest,
                         testing::Combine(testing::Values(64, 128), testing::Values(4, 7, 12),
                                          testing::Values(DType::kFloat8E4M3, DType::kInt8)),
                         CaseName());

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

// The kernel's own maximum of a row is that of an earlier page, until logits grow far beyond it.
constexpr double kGrowth = 0.06;

TEST_P(AttendCudaTest, PrefillWhereLogitsGrowFromPageToPage) {
  constexpr int64_t kTokens = 700;
  AttentionBatch batch(Shape(), 1, kTokens, 25);
  batch.FillContext(0, kTokens, kGrowth);
  for (int64_t begin = 0; begin < kTokens; begin += 64) {
    batch.AddBlock(0, begin, std::min<int64_t>(64, kTokens - begin));
  }
  ExpectMatchesReference(batch, Prefill);
}

// Chunks of a prompt may end anywhere, and with them its query tiles.
TEST_P(AttendCudaTest, APromptHasTheSameBitsInAnyTiles) {
  constexpr int64_t kTokens = 330;
  const auto outputs = [&](double growth, int64_t first_tile_rows) {
    AttentionBatch batch(Shape(), 1, kTokens, 24);
    batch.FillContext(0, kTokens, growth);
    int64_t rows = first_tile_rows;
    for (int64_t begin = 0; begin < kTokens; begin += rows) {
      if (begin > 0) rows = std::min<int64_t>(64, kTokens - begin);
      batch.AddBlock(0, begin, rows);
    }
    EXPECT_TRUE(DeviceAttentionBatch(batch).Run(Prefill).ok());
    return Outputs(batch);
  };
  for (const double growth : {0.0, kGrowth}) {
    const std::vector<float> expected = outputs(growth, 64);
    for (const int64_t rows : {1, 17, 63}) EXPECT_EQ(outputs(growth, rows), expected) << rows;
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
  const int64_t times = TimesRead();
  int64_t touched = 0;
  for (size_t page = 0; page < device.missed_bytes().size(); ++page) {
    const bool missed =
        static_cast<int64_t>(page) == kv.extent(0, 5) * kv.layout.pages_per_block() + layer_page;
    EXPECT_EQ(device.missed_bytes()[page], missed ? times * kv.layout.page_bytes() : 0) << page;
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
  const int64_t missed = kv.extent(0, kHostPage) * kv.layout.pages_per_block() +
                         kv.layout.page_in_block(AttentionBatch::kLayer, 1);
  EXPECT_EQ(device.missed_bytes()[static_cast<size_t>(missed)],
            TimesRead() * 3 * kv.layout.token_bytes());
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

// A row's units are tasks of their own where it is alone. Among others, a task has several of them,
// or all.
TEST_P(AttendCudaTest, ARowHasTheSameBitsAloneAndAmongOthers) {
  struct Batch {
    int64_t rows;
    int64_t tokens;
    bool has_whole_rows;
  };
  AttentionShape shape = Shape();
  shape.kv_heads = 16;
  int processors = 0;
  ASSERT_EQ(CountMultiprocessors(processors), cudaSuccess);
  const int64_t ctas = PlanAttendDecode({.group = shape.group}, processors).ctas;
  for (const Batch& some : {Batch{.rows = 4, .tokens = 2500, .has_whole_rows = false},
                            Batch{.rows = 8, .tokens = 1300, .has_whole_rows = true}}) {
    SCOPED_TRACE(some.rows);
    AttentionBatch batch(shape, some.rows, some.tokens, 14);
    for (int64_t slot = 0; slot < some.rows; ++slot) {
      batch.FillContext(slot, some.tokens);
      const int64_t position = some.tokens - 1 - slot * 60;
      if (slot % 2 == 0) {
        batch.AddBlock(slot, position, 1);
      } else {
        batch.AddBlock(slot, position, 1,
                       [&](int64_t) { return RandomList(batch.rng(), position); });
      }
    }
    const int64_t units =
        NumDecodeUnits(NumberItems({}, some.tokens - 1).num_items, shape.kv_heads);
    const auto at_once = [&](int64_t rows) {
      return DecodeUnitsAtOnce(rows * shape.kv_heads, units, ctas);
    };
    if (ctas >= 128) {
      ASSERT_EQ(at_once(1), 1) << "a premise";
      ASSERT_GT(at_once(some.rows), 1) << "a premise";
      ASSERT_EQ(at_once(some.rows) == units, some.has_whole_rows) << "a premise";
    }
    ASSERT_TRUE(DeviceAttentionBatch(batch).Run(Decode).ok());
    const std::vector<float> together = Outputs(batch);
    ASSERT_TRUE(DeviceAttentionBatch(batch)
                    .Run([](CudaAttendParams params, const KvTensorMaps& maps) -> absl::Status {
                      const int64_t heads = params.kv.layout.num_kv_heads;
                      for (size_t row = 0; row < params.tiles.size(); ++row) {
                        CudaAttendParams alone = params;
                        alone.tiles = params.tiles.subspan(row, 1);
                        alone.selection =
                            params.selection.Rows(static_cast<int64_t>(row) * heads, heads);
                        KVASIR_RETURN_IF_ERROR(Decode(alone, maps));
                      }
                      return absl::OkStatus();
                    })
                    .ok());
    EXPECT_EQ(together, Outputs(batch));
  }
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
      [&](CudaAttendParams params, const KvTensorMaps& maps) -> absl::Status {
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

TEST(AttendCudaParams, GroupedPositionsNeedUnrotatedKeys) {
  const AttentionShape shape = {.activation = DType::kBFloat16, .kv = DType::kBFloat16};
  AttentionBatch batch(shape, 1, 64, 1);
  batch.FillContext(0, 64);
  batch.AddBlock(0, 63, 1);
  CudaAttendParams params;
  batch.Run([&](const AttendParams& of_batch, Executor&) { params = {of_batch}; });
  params.grouped = {.group_size = 8, .window = 1024};
  for (const absl::Status& status : {AttendDecode(params, KvTensorMaps{}, nullptr, {}, nullptr),
                                     AttendPrefill(params, KvTensorMaps{}, nullptr)}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("grouped positions need device_rope"), absl::string_view::npos);
  }
}

}  // namespace
}  // namespace kvasir::kernels
