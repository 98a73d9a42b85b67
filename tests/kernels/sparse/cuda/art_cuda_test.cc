// The GPU's art: the pages that it reads and leaves and its output, against dense attention and the
// CPU's art.
#include "kernels/sparse/art/art_cuda.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <gtest/gtest.h>
#include <limits>
#include <span>
#include <tuple>
#include <vector>

#include "kernels/attention/attend_cpu.h"
#include "kernels/sparse/art/art_terminator.h"
#include "kernels/sparse/common/ranking.h"
#include "kernels/sparse/common/select_common.h"
#include "tests/support/case_name.h"
#include "tests/support/compare.h"
#include "tests/support/device_attention_batch.h"
#include "tests/support/local_attention_batch.h"
#include "tests/support/walked_counts.h"

namespace kvasir::kernels {
namespace {

constexpr PolicyNumbers kNumbers = {.sink_tokens = 40, .window_tokens = 130, .patience = 5};
// Pages that may have been asked for when a row ends.
constexpr int64_t kAskedFor = 3;

// head_dim, query heads of a KV head, form of keys, dtype of the KV.
class ArtCudaTest : public testing::TestWithParam<std::tuple<int64_t, int64_t, Keys, DType>> {
 protected:
  void SetUp() override {
    if (!HasGpu()) GTEST_SKIP() << "no GPU on this machine";
  }
  static AttentionBatch Make(int64_t slots, int64_t tokens, uint64_t seed) {
    return MakeBatch({.activation = DType::kBFloat16,
                      .kv = std::get<3>(GetParam()),
                      .head_dim = std::get<0>(GetParam()),
                      .kv_heads = 2,
                      .group = std::get<1>(GetParam())},
                     std::get<2>(GetParam()), slots, tokens, seed);
  }

  // Unread pages by row.
  static std::vector<int64_t> RunOnGpu(AttentionBatch& batch, const ArtOptions& options,
                                       const PolicyNumbers& numbers = kNumbers) {
    std::vector<SelectedCounts> expected = tests::WalkedCounts(batch);
    std::vector<SelectedCounts> counts;
    const absl::Status status = DeviceAttentionBatch(batch).Run(
        [&](CudaAttendParams params, const KvTensorMaps& maps) -> absl::Status {
          DeviceMemory memory;
          counts.resize(static_cast<size_t>(params.selection.num_rows));
          const std::vector<PolicyNumbers> all(params.tiles.size(), numbers);
          KVASIR_ASSIGN_OR_RETURN(SelectedCounts * device_counts,
                                  memory.Copy(counts.data(), counts.size()));
          KVASIR_ASSIGN_OR_RETURN(PolicyNumbers * device_numbers,
                                  memory.Copy(all.data(), all.size()));
          KVASIR_ASSIGN_OR_RETURN(const DeviceBuffer workspace,
                                  DeviceBuffer::Allocate(AttendArtWorkspaceBytes(
                                      params.kv, std::ssize(params.tiles), batch.shape().group)));
          params.device_counts = {device_counts, counts.size()};
          KVASIR_RETURN_IF_ERROR(
              AttendArt(params, {.options = options, .numbers = {device_numbers, all.size()}}, maps,
                        workspace.data(), nullptr));
          KVASIR_RETURN_IF_ERROR(CudaStatus(cudaDeviceSynchronize(), "running the kernel"));
          return DeviceMemory::Fetch(device_counts, counts.data(),
                                     counts.size() * sizeof(counts.front()));
        });
    EXPECT_TRUE(status.ok()) << status;
    std::vector<int64_t> unread;
    for (const SelectedCounts& row : counts) unread.push_back(row.unread_pages);
    for (size_t row = 0; row < expected.size(); ++row) {
      expected[row].unread_pages = counts[row].unread_pages;
      EXPECT_TRUE(tests::AreSame(counts[row], expected[row])) << row;
    }
    return unread;
  }

  static std::vector<int64_t> UnreadOnCpu(AttentionBatch& batch, const ArtOptions& options,
                                          const PolicyNumbers& numbers = kNumbers) {
    const ArtTerminator art(options);
    std::vector<Termination> terminations;
    for (const QueryTile& tile : batch.blocks()) {
      terminations.push_back(MakeTermination(&art, tile, numbers));
    }
    batch.SetTerminations(std::move(terminations));
    batch.Run(
        [](const AttendParams& params, Executor& executor) { AttendReference(params, executor); });
    std::vector<int64_t> unread;
    for (int64_t block = 0; block < std::ssize(batch.blocks()); ++block) {
      for (int64_t head = 0; head < batch.shape().kv_heads; ++head) {
        const UnreadPages& row = batch.unread(block, head);
        unread.push_back(row.device + row.host);
      }
    }
    batch.SetTerminations(std::vector<Termination>(batch.blocks().size()));
    return unread;
  }

  // A block at the end of the first one's context, with its queries, that attends to lists.
  static void AddListingBlock(AttentionBatch& batch, int64_t context,
                              const std::function<RowSelection(int64_t head)>& select) {
    batch.AddBlock(0, context - 1, 1, select);
    const int64_t row = batch.num_tokens() - 1;
    std::copy_n(batch.q(0, 0), batch.heads() * batch.shape().head_dim, batch.q(row, 0));
  }
  // Returns the unread pages of the rows with lists, which must end where the CPU's rows do.
  static std::vector<int64_t> UnreadOfListingRows(AttentionBatch& batch,
                                                  const ArtOptions& options) {
    const std::vector<int64_t> expected = UnreadOnCpu(batch, options);
    const std::vector<int64_t> found = RunOnGpu(batch, options);
    std::vector<int64_t> of_lists;
    for (size_t row = 0; row < found.size(); ++row) {
      const SelectionHeader& header = batch.Params().selection.header(static_cast<int64_t>(row));
      if (header.kind != SelectionHeader::Kind::kList) continue;
      EXPECT_EQ(found[row], expected[row] - kAskedFor) << row;
      of_lists.push_back(expected[row]);
    }
    return of_lists;
  }

  // Returns the batch's output when every page is read.
  static std::vector<float> RunWhole(AttentionBatch& batch) {
    batch.Run(
        [](const AttendParams& params, Executor& executor) { AttendReference(params, executor); });
    return Outputs(batch);
  }
  static std::vector<float> Outputs(const AttentionBatch& batch) {
    const float* first = batch.out(0, 0);
    return {first, first + batch.num_tokens() * batch.heads() * batch.shape().head_dim};
  }
  static testing::AssertionResult IsClose(const AttentionBatch& batch,
                                          const std::vector<float>& whole) {
    return tests::AllClose(Outputs(batch), whole, {.absolute = 1e-2, .relative = 1e-2},
                           {batch.num_tokens(), batch.heads(), batch.shape().head_dim});
  }
};

INSTANTIATE_TEST_SUITE_P(Shapes, ArtCudaTest,
                         testing::Combine(testing::Values(64, 128), testing::Values(1, 4, 7),
                                          testing::Values(Keys::kRotated, Keys::kUnrotated),
                                          testing::Values(DType::kBFloat16)),
                         CaseName());
INSTANTIATE_TEST_SUITE_P(Codes, ArtCudaTest,
                         testing::Combine(testing::Values(64, 128), testing::Values(4),
                                          testing::Values(Keys::kRotated, Keys::kUnrotated),
                                          testing::Values(DType::kFloat8E4M3, DType::kInt8)),
                         CaseName());

// Lists with pruned pages and all, of many lengths.
TEST_P(ArtCudaTest, PatienceThatIsNeverReachedReadsEverything) {
  AttentionBatch batch = Make(3, 3000, 91);
  for (int64_t slot = 0; slot < 3; ++slot) {
    const int64_t tokens = std::vector<int64_t>{3000, 65, 2111}[static_cast<size_t>(slot)];
    batch.FillContext(slot, tokens);
    batch.AddBlock(slot, tokens - 1, 1);
    if (tokens < 1000) continue;
    batch.AddBlock(slot, tokens - 1, 1, [&](int64_t) {
      std::vector<SelectionEntry> entries;
      for (int64_t page = 0; page < tokens / kPageTokens; ++page) {
        const uint64_t chosen = batch.rng()() | batch.rng()();
        if (batch.rng()() % 3 == 0) continue;
        entries.push_back({.page = page,
                           .chosen = chosen,
                           .live = batch.rng()() % 3 == 0 ? 0 : chosen & batch.rng()(),
                           .score = static_cast<float>(batch.rng()() % 20)});
      }
      return SelectList(100, tokens - 200, std::move(entries));
    });
  }
  const std::vector<float> whole = RunWhole(batch);
  PolicyNumbers numbers = kNumbers;
  for (const int64_t patience : {20, 1000}) {
    numbers.patience = patience;
    for (const auto order : {ReadingOrder::kRecency, ReadingOrder::kImportance}) {
      const std::vector<int64_t> unread = RunOnGpu(batch, {.order = order}, numbers);
      EXPECT_EQ(unread, std::vector<int64_t>(unread.size(), 0));
      EXPECT_TRUE(IsClose(batch, whole)) << "patience " << patience;
    }
  }
}

TEST_P(ArtCudaTest, RowsEndWhereTheCpusDo) {
  AttentionBatch batch = Make(3, 6000, 92);
  AddLocalBlock(batch, 0, 3000, 200, 40);
  AddLocalBlock(batch, 1, 5900, 700, 40);
  batch.FillContext(2, 4100);
  batch.AddBlock(2, 4099, 1);  // nothing local
  const std::vector<float> whole = RunWhole(batch);
  const std::vector<int64_t> expected = UnreadOnCpu(batch, {});
  const std::vector<int64_t> found = RunOnGpu(batch, {});
  EXPECT_TRUE(IsClose(batch, whole));
  for (size_t row = 0; row < found.size(); ++row) {
    SCOPED_TRACE(row);
    if (row < 4) {
      EXPECT_GT(expected[row], 10);
      EXPECT_NEAR(static_cast<double>(found[row]), static_cast<double>(expected[row] - kAskedFor),
                  2);
    } else {
      EXPECT_EQ(found[row], 0);
      EXPECT_EQ(expected[row], 0);
    }
  }
}

// A page that both the window and the list, or both the sink and the list, have tokens of is one
// step; without a sink no page is read before the newest.
TEST_P(ArtCudaTest, RowsWithListsEndWhereTheCpusDo) {
  constexpr int64_t kContext = 3000;
  AttentionBatch batch = Make(1, kContext, 96);
  AddLocalBlock(batch, 0, kContext, 30, 40);
  for (const int64_t window_begin : {2752, 2800}) {
    for (const int64_t sink_end : {0, 40, 128}) {
      AddListingBlock(batch, kContext, [&](int64_t head) {
        std::vector<SelectionEntry> entries;
        const int64_t first = sink_end == 0 ? 2 + head : sink_end / kPageTokens;
        for (int64_t page = first; page * kPageTokens < window_begin; ++page) {
          const int64_t start = page * kPageTokens;
          const uint64_t mask = TokenMask(sink_end - start, window_begin - start);
          entries.push_back({.page = page, .chosen = mask, .live = mask});
        }
        return SelectList(sink_end, window_begin, std::move(entries));
      });
    }
  }
  for (const int64_t unread : UnreadOfListingRows(batch, {})) EXPECT_GT(unread, 10);
}

// Pruned pages and listed pages from the window on are no steps: a row that has settled within its
// window ends there.
TEST_P(ArtCudaTest, RowsEndBeforeListedPagesWithoutTokens) {
  constexpr int64_t kContext = 3000, kWindowBegin = 2420, kSinkEnd = 40, kPages = 20;
  AttentionBatch batch = Make(1, kContext, 97);
  AddLocalBlock(batch, 0, kContext, 30, 40);
  for (const int64_t listed :
       {kPages + 1, kWindowBegin / kPageTokens + 1, kContext / kPageTokens}) {
    AddListingBlock(batch, kContext, [&](int64_t) {
      std::vector<SelectionEntry> entries;
      for (int64_t page = 1; page < listed; ++page) {
        entries.push_back(
            {.page = page, .chosen = ~uint64_t{0}, .live = page <= kPages ? ~uint64_t{0} : 0});
      }
      return SelectList(kSinkEnd, kWindowBegin, std::move(entries));
    });
  }
  for (const int64_t unread : UnreadOfListingRows(batch, {})) EXPECT_EQ(unread, kPages);
}

// Pages are left from the least score on, and a far needle is read where its page has the best one.
TEST_P(ArtCudaTest, InOrderOfImportanceWhatScoresLeastStaysUnread) {
  constexpr int64_t kContext = 4096, kPages = 61, kNeedlePage = 31;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const ArtOptions options = {.guard = ArtOptions::Guard::kNone,
                              .order = ReadingOrder::kImportance};
  constexpr float kSome[] = {0, -0.0f, 1, -3, 7.5f, NAN, -kInfinity, 1e-30f};
  for (const auto& score : std::vector<std::function<float(int64_t page)>>{
           [](int64_t page) { return static_cast<float>(page * 37 % kPages); },
           [&](int64_t page) { return kSome[page * 5 % std::ssize(kSome)]; },
           [](int64_t) { return NAN; }}) {
    for (const float of_needle : {kInfinity, -kInfinity}) {
      AttentionBatch batch = Make(1, kContext, 98);
      std::vector<Ranked> ranked;  // pages with tokens
      std::vector<SelectionEntry> entries;
      for (int64_t page = 1; page <= kPages; ++page) {
        const bool is_pruned = page % 9 == 0;
        entries.push_back({.page = page,
                           .chosen = ~uint64_t{0},
                           .live = is_pruned ? 0 : ~uint64_t{0},
                           .score = page == kNeedlePage ? of_needle : score(page)});
        if (!is_pruned) ranked.emplace_back(entries.back().score, page);
      }
      std::sort(ranked.begin(), ranked.end(), std::greater<>());
      AddLocalBlock(batch, 0, kContext, 60, 40, [&](int64_t) {
        return SelectList(kPageTokens, (kPages + 1) * kPageTokens, entries);
      });
      AddPeak(batch, 0, kNeedlePage * kPageTokens, kNeedlePage * kPageTokens + 1, 50);
      const std::vector<float> whole = RunWhole(batch);
      RunOnGpu(batch, {.order = ReadingOrder::kImportance});
      EXPECT_TRUE(IsClose(batch, whole)) << "the guard must have it read";
      const std::vector<int64_t> unread = UnreadOfListingRows(batch, options);
      EXPECT_EQ(IsClose(batch, whole), of_needle > 0) << "whether the needle was read";
      for (size_t head = 0; head < unread.size(); ++head) {
        ASSERT_GT(unread[head], 30);
        ASSERT_LT(unread[head], std::ssize(ranked));
        for (const Ranked page :
             std::span(ranked).last(static_cast<size_t>(unread[head] - kAskedFor))) {
          batch.kv().SetTier(0, page.item(), AttentionBatch::kLayer, static_cast<int64_t>(head),
                             PageTier::kAbsent);
        }
      }
      const std::vector<float> found = Outputs(batch);
      RunOnGpu(batch, options);
      EXPECT_EQ(batch.fault(0), 0) << "what stayed unread was asked for";
      EXPECT_EQ(Outputs(batch), found);
    }
  }
}

TEST_P(ArtCudaTest, AFarNeedleIsMissedWithoutTheGuardAndKeptWithIt) {
  constexpr int64_t kNeedle = 2047;  // at a quarter of the context, in page 31
  AttentionBatch batch = Make(1, 8192, 93);
  AddLocalBlock(batch, 0, 8192, 200, 40);
  AddPeak(batch, 0, kNeedle, kNeedle + 1, 50);
  const std::vector<float> whole = RunWhole(batch);
  for (const auto probe : {ArtOptions::Probe::kNormalised, ArtOptions::Probe::kRaw}) {
    const ArtOptions options = {.probe = probe, .guard = ArtOptions::Guard::kNone};
    const std::vector<int64_t> unguarded = RunOnGpu(batch, options);
    EXPECT_GT(unguarded[0], 110);
    EXPECT_FALSE(IsClose(batch, whole));
  }
  const std::vector<int64_t> guarded = RunOnGpu(batch, {});
  EXPECT_GT(guarded[0], 0);   // it ends, but
  EXPECT_LT(guarded[0], 31);  // after the needle was read
  EXPECT_TRUE(IsClose(batch, whole));
}

// One head of the group looks far away: the row is read for it, for all.
TEST_P(ArtCudaTest, AllHeadsOfAGroupMustHaveSettled) {
  AttentionBatch batch = Make(1, 4096, 94);
  AddLocalBlock(batch, 0, 4096, 200, 40);
  batch.AddBlock(0, 4095, 1);
  for (int64_t head = 0; head < batch.heads(); ++head) {
    for (int64_t i = 0; i < batch.shape().head_dim; ++i) {
      batch.q(1, head)[i] =
          head % batch.shape().group == batch.shape().group - 1 ? 0.0f : batch.q(0, head)[i];
    }
  }
  const std::vector<float> whole = RunWhole(batch);
  for (const auto guard : {ArtOptions::Guard::kBounds, ArtOptions::Guard::kNone}) {
    const std::vector<int64_t> unread = RunOnGpu(batch, {.guard = guard});
    EXPECT_GT(unread[0], 10);
    EXPECT_EQ(unread[2], 0);
    EXPECT_EQ(unread[3], 0);
    EXPECT_TRUE(IsClose(batch, whole));
  }
}

TEST_P(ArtCudaTest, WhatIsUnreadIsNotAskedForAndTheWholeSinkIs) {
  AttentionBatch batch = Make(1, 3000, 95);
  AddLocalBlock(batch, 0, 3000, 200, 40);
  PolicyNumbers numbers = kNumbers;
  numbers.sink_tokens = 200;
  const std::vector<float> whole = RunWhole(batch);
  const std::vector<int64_t> unread = RunOnGpu(batch, {}, numbers);
  ASSERT_GT(unread[0], 10);
  // No page at all changes nothing.
  for (int64_t page = 4; page < 4 + unread[0]; ++page) {
    batch.kv().SetTier(0, page, AttentionBatch::kLayer, 0, PageTier::kAbsent);
  }
  EXPECT_EQ(RunOnGpu(batch, {}, numbers), unread);
  EXPECT_EQ(batch.fault(0), 0);
  EXPECT_TRUE(IsClose(batch, whole));
  batch.kv().SetTier(0, 3, AttentionBatch::kLayer, 0, PageTier::kAbsent);  // of the sink
  RunOnGpu(batch, {}, numbers);
  EXPECT_EQ(batch.fault(0), 1);
}

}  // namespace
}  // namespace kvasir::kernels
