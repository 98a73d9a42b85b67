// The GPU's pruner top_p against the CPU's, over lists of quest and of tokenselect.
#include "kernels/sparse/top_p/top_p_cuda.h"

#include <algorithm>
#include <cmath>
#include <gtest/gtest.h>
#include <limits>
#include <tuple>
#include <vector>

#include "kernels/sparse/quest/quest_selector.h"
#include "kernels/sparse/tokenselect/tokenselect_selector.h"
#include "kernels/sparse/top_p/top_p_pruner.h"
#include "tests/support/case_name.h"
#include "tests/support/device_select.h"

namespace kvasir::kernels {
namespace {

constexpr int64_t kMaxTokens = 4096;

// head_dim, query heads of a KV head, dtype of q.
class TopPCudaTest : public testing::TestWithParam<std::tuple<int64_t, int64_t, DType>> {
 protected:
  void SetUp() override {
    if (!HasGpu()) GTEST_SKIP() << "no GPU on this machine";
  }
  static AttentionShape Shape() {
    return {.activation = std::get<2>(GetParam()),
            .kv = DType::kBFloat16,
            .head_dim = std::get<0>(GetParam()),
            .kv_heads = 2,
            .group = std::get<1>(GetParam())};
  }
  static Lists PruneOnGpu(AttentionBatch& batch, const std::vector<PolicyNumbers>& numbers,
                          const PageSelection& selection, int64_t max_tokens = kMaxTokens) {
    const KvLayout layout = batch.kv().View().layout;
    return RunSelectOnGpu(
        batch, numbers, selection,
        TopPWorkspaceBytes(layout, batch.shape().group, std::ssize(numbers), selection.capacity,
                           max_tokens),
        [&](const CudaSelectParams& params, const PageSelection& out, std::byte* workspace) {
          return PruneTopP(params, out, max_tokens, workspace, nullptr);
        });
  }
  static HostLists Selected(const Selector& selector, AttentionBatch& batch,
                            const std::vector<PolicyNumbers>& numbers, int64_t capacity) {
    PageSelection selection = batch.MakeSelection(capacity);
    SerialExecutor executor;
    EXPECT_TRUE(selector.Select(batch.ParamsForSelect(numbers), selection, executor).ok());
    return HostLists(selection);
  }
};

INSTANTIATE_TEST_SUITE_P(Shapes, TopPCudaTest,
                         testing::Combine(testing::Values(64, 128), testing::Values(1, 3, 4, 8),
                                          testing::Values(DType::kFloat32, DType::kBFloat16)),
                         CaseName());

void ExpectPrunedAlike(AttentionBatch& batch, const std::vector<PolicyNumbers>& numbers,
                       const HostLists& selected, const Lists& found) {
  HostLists expected = selected;
  SerialExecutor executor;
  PageSelection view = expected.View();
  ASSERT_TRUE(TopPPruner().Prune(batch.ParamsForSelect(numbers), view, executor).ok());
  int64_t kept = 0, other = 0, chosen = 0;
  for (size_t row = 0; row < expected.headers.size(); ++row) {
    SCOPED_TRACE(row);
    ExpectSameHeader(found.headers[row], expected.headers[row]);
    const SelectionEntry* list = view.list(static_cast<int64_t>(row));
    EXPECT_EQ(TokensOf(found.headers[row], found.list(row), &SelectionEntry::chosen),
              TokensOf(expected.headers[row], list, &SelectionEntry::chosen));
    const auto left = TokensOf(found.headers[row], found.list(row), &SelectionEntry::live);
    const auto right = TokensOf(expected.headers[row], list, &SelectionEntry::live);
    std::vector<int64_t> differing;
    std::set_symmetric_difference(left.begin(), left.end(), right.begin(), right.end(),
                                  std::back_inserter(differing));
    kept += std::ssize(right);
    other += std::ssize(differing);
    chosen += std::ssize(TokensOf(expected.headers[row], list, &SelectionEntry::chosen));
  }
  EXPECT_LE(other * 1000, chosen) << "weights as good as the threshold";
  EXPECT_LT(kept, chosen) << "nothing was pruned";
}

// Two texts, and rows of every kind over them.
std::vector<PolicyNumbers> AddTextsAndRows(AttentionBatch& batch) {
  batch.FillContext(0, 4096);
  batch.FillContext(1, 2048);
  std::vector<PolicyNumbers> numbers;
  for (const float top_p :
       {0.1f, 0.6f, 0.9f, 0.99f, 1.0f, std::numeric_limits<float>::quiet_NaN()}) {
    batch.AddBlock(0, 4095, 1);
    numbers.push_back(
        {.sink_tokens = 70, .window_tokens = 200, .budget_tokens = 1600, .top_p = top_p});
  }
  batch.AddBlock(0, 4032, 64);  // several queries: left as it is
  numbers.push_back({.sink_tokens = 64, .window_tokens = 128, .budget_tokens = 640, .top_p = 0.5f});
  batch.AddBlock(1, 2000, 1);
  numbers.push_back({.sink_tokens = 0, .window_tokens = 1, .budget_tokens = 300, .top_p = 0.8f});
  batch.AddBlock(1, 90, 1);  // all
  numbers.push_back({.sink_tokens = 64, .window_tokens = 64, .budget_tokens = 640, .top_p = 0.5f});
  return numbers;
}

TEST_P(TopPCudaTest, KeepsWhatTheCpuKeepsOfPages) {
  AttentionBatch batch(Shape(), 2, 4096, 61);
  const std::vector<PolicyNumbers> numbers = AddTextsAndRows(batch);
  HostLists selected = Selected(QuestSelector(), batch, numbers, 32);
  ExpectPrunedAlike(batch, numbers, selected, PruneOnGpu(batch, numbers, selected.View()));
}

TEST_P(TopPCudaTest, KeepsWhatTheCpuKeepsOfTokens) {
  AttentionBatch batch(Shape(), 2, 4096, 62);
  const std::vector<PolicyNumbers> numbers = AddTextsAndRows(batch);
  HostLists selected = Selected(*TokenSelectSelector::Create({}).value(), batch, numbers, 64);
  ExpectPrunedAlike(batch, numbers, selected, PruneOnGpu(batch, numbers, selected.View()));
}

// The weights are so nearly equal that most fall into one bin of the first count.
TEST_P(TopPCudaTest, WeightsMayBeAlike) {
  AttentionBatch batch(Shape(), 2, 4096, 65);
  batch.UseScale(0.01f / std::sqrt(static_cast<float>(Shape().head_dim)));
  const std::vector<PolicyNumbers> numbers = AddTextsAndRows(batch);
  HostLists selected = Selected(QuestSelector(), batch, numbers, 32);
  ExpectPrunedAlike(batch, numbers, selected, PruneOnGpu(batch, numbers, selected.View()));
}

// Equals stay together: all of them are kept, or none where sink and window are enough.
TEST_P(TopPCudaTest, WeightsMayBeEqual) {
  AttentionBatch batch(Shape(), 1, 4096, 66);
  batch.UseScale(0);
  batch.FillContext(0, 4096);
  batch.AddBlock(0, 4095, 1);
  batch.AddBlock(0, 4095, 1);
  const PolicyNumbers all = {
      .sink_tokens = 64, .window_tokens = 64, .budget_tokens = 1280, .top_p = 0.3f};
  const PolicyNumbers none = {
      .sink_tokens = 64, .window_tokens = 1216, .budget_tokens = 1280, .top_p = 0.49f};
  const std::vector<PolicyNumbers> numbers = {all, none};
  HostLists selected = Selected(QuestSelector(), batch, numbers, 24);
  const Lists found = PruneOnGpu(batch, numbers, selected.View());
  for (size_t row = 0; row < 4; ++row) {
    const auto live = TokensOf(found.headers[row], found.list(row), &SelectionEntry::live);
    EXPECT_EQ(std::ssize(live), row < 2 ? 1280 : 0) << "row " << row;
  }
}

// Logits of missing blocks are -inf; a query that is NaN keeps everything.
TEST_P(TopPCudaTest, BlocksMayBeMissingAndQueriesNaN) {
  AttentionBatch batch(Shape(), 1, 4096, 68);
  batch.FillContext(0, 2048);
  std::vector<SelectionEntry> entries;
  for (int64_t page = 0; page < 64; page += 3) {
    entries.push_back({.page = page, .chosen = ~uint64_t{0} << page, .live = ~uint64_t{0} << page});
  }
  RowSelection row = SelectList(200, 4000, std::move(entries));
  row.header.query_position = row.header.made_at = 4095;
  for (int64_t i = 0; i < 2; ++i) {
    batch.AddBlock(0, 4095, 1, [&](int64_t) { return row; });
  }
  batch.q(1, 0)[1] = std::numeric_limits<float>::quiet_NaN();
  const std::vector<PolicyNumbers> numbers(2, {.window_tokens = 1, .top_p = 0.8f});
  HostLists selected(batch.Params().selection);
  ExpectPrunedAlike(batch, numbers, selected, PruneOnGpu(batch, numbers, selected.View()));
}

// The batch has another policy with a large budget.
TEST_P(TopPCudaTest, ListsMayHaveRoomForMoreThanSharedMemoryHas) {
  AttentionBatch batch(Shape(), 2, 4096, 64);
  const std::vector<PolicyNumbers> numbers = AddTextsAndRows(batch);
  HostLists selected = Selected(QuestSelector(), batch, numbers, 60'000);
  ExpectPrunedAlike(batch, numbers, selected, PruneOnGpu(batch, numbers, selected.View()));
}

TEST_P(TopPCudaTest, ARowThatTheWorkspaceHasNoRoomForStaysAsItIs) {
  AttentionBatch batch(Shape(), 1, 4096, 63);
  batch.FillContext(0, 4096);
  batch.AddBlock(0, 4095, 1);
  batch.AddBlock(0, 4095, 1);
  const std::vector<PolicyNumbers> numbers = {
      {.sink_tokens = 64, .window_tokens = 64, .budget_tokens = 640, .top_p = 0.3f},
      {.sink_tokens = 64, .window_tokens = 64, .budget_tokens = 1280, .top_p = 0.3f}};
  HostLists selected = Selected(QuestSelector(), batch, numbers, 20);
  const Lists found = PruneOnGpu(batch, numbers, selected.View(), 800);
  for (size_t row = 0; row < 4; ++row) {
    const auto live = TokensOf(found.headers[row], found.list(row), &SelectionEntry::live);
    const auto chosen = TokensOf(found.headers[row], found.list(row), &SelectionEntry::chosen);
    if (row < 2) {
      EXPECT_LT(live.size(), chosen.size());
    } else {
      EXPECT_EQ(live, chosen);
    }
  }
}

// Lists of hundreds of pages, all of their tokens or a few, more than a block of threads has
// shared memory for.
class LongTopPCudaTest : public TopPCudaTest {
 protected:
  static constexpr int64_t kTokens = 40'960;

  static RowSelection ListOf(AttentionBatch& batch, bool is_dense) {
    std::vector<SelectionEntry> entries;
    for (int64_t page = 1; page < kTokens / kPageTokens - 1; ++page) {
      const uint64_t chosen = is_dense ? ~uint64_t{0} : uint64_t{0x8001} << (batch.rng()() % 48);
      entries.push_back({.page = page, .chosen = chosen, .live = chosen});
    }
    RowSelection row = SelectList(70, kTokens - 100, std::move(entries));
    row.header.query_position = row.header.made_at = kTokens - 1;
    return row;
  }
  // Every other KV head's list is a dense one.
  static void ExpectBlocksPrunedAlike(int64_t num_blocks) {
    AttentionBatch batch(Shape(), 1, kTokens, 67);
    batch.FillContext(0, kTokens);
    std::vector<PolicyNumbers> numbers;
    for (int64_t i = 0; i < num_blocks; ++i) {
      batch.AddBlock(0, kTokens - 1, 1,
                     [&](int64_t head) { return ListOf(batch, (i + head) % 2 == 0); });
      numbers.push_back({.window_tokens = 1, .top_p = 0.7f});
    }
    const HostLists selected(batch.Params().selection);
    HostLists copy = selected;
    ExpectPrunedAlike(batch, numbers, selected, PruneOnGpu(batch, numbers, copy.View(), kTokens));
  }
};

INSTANTIATE_TEST_SUITE_P(Shapes, LongTopPCudaTest,
                         testing::Values(std::tuple(64, 3, DType::kFloat32),
                                         std::tuple(128, 8, DType::kBFloat16)),
                         CaseName());

TEST_P(LongTopPCudaTest, FewRowsKeepWhatTheCpuKeeps) { ExpectBlocksPrunedAlike(1); }

// There are enough rows that each has a CTA of its own.
TEST_P(LongTopPCudaTest, ManyRowsKeepWhatTheCpuKeeps) { ExpectBlocksPrunedAlike(33); }

}  // namespace
}  // namespace kvasir::kernels
