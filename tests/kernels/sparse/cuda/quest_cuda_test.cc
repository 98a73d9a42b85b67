// The GPU's quest against the CPU's, and a decode step of attention over what it selects.
#include "kernels/sparse/quest/quest_cuda.h"

#include <algorithm>
#include <cmath>
#include <gtest/gtest.h>
#include <limits>
#include <set>
#include <tuple>
#include <vector>

#include "kernels/attention/attend_cpu.h"
#include "kernels/sparse/quest/quest_selector.h"
#include "tests/support/attention_batch.h"
#include "tests/support/case_name.h"
#include "tests/support/compare.h"
#include "tests/support/device_attention_batch.h"
#include "tests/support/device_paged_kv.h"
#include "tests/support/device_select.h"

namespace kvasir::kernels {
namespace {

using Kind = SelectionHeader::Kind;

Lists SelectOnGpu(AttentionBatch& batch, const std::vector<PolicyNumbers>& numbers,
                  int64_t capacity, QuestScore score = QuestScore::kEstimate) {
  return RunSelectOnGpu(
      batch, numbers, HostLists(batch, capacity).View(),
      QuestWorkspaceBytes(batch.kv().View(), std::ssize(numbers)),
      [&](const CudaSelectParams& params, const PageSelection& out, std::byte* workspace) {
        return SelectQuest(score, params, out, workspace, nullptr);
      });
}

PageSelection SelectOnCpu(AttentionBatch& batch, const std::vector<PolicyNumbers>& numbers,
                          int64_t capacity, QuestScore score = QuestScore::kEstimate) {
  PageSelection selection = batch.MakeSelection(capacity);
  SerialExecutor executor;
  const absl::Status status =
      QuestSelector(score).Select(batch.ParamsForSelect(numbers), selection, executor);
  EXPECT_TRUE(status.ok()) << status;
  return selection;
}

// Whether the lists are the same. Where they differ, the scores of pages that only one of them has
// are within 1e-3 of the last one chosen.
bool SameList(const SelectionEntry* found, const SelectionEntry* expected, int32_t count) {
  float last = std::numeric_limits<float>::infinity();
  std::set<int64_t> pages;
  for (int32_t i = 0; i < count; ++i) {
    last = std::min(last, expected[i].score);
    pages.insert(expected[i].page);
  }
  bool same = true;
  for (int32_t i = 0; i < count; ++i) {
    EXPECT_EQ(found[i].chosen, ~uint64_t{0});
    EXPECT_EQ(found[i].live, ~uint64_t{0});
    EXPECT_EQ(found[i].pos0, 0);
    if (i > 0) {
      EXPECT_LT(found[i - 1].page, found[i].page) << "ascending";
    }
    if (pages.count(found[i].page) == 0) {
      same = false;
      EXPECT_NEAR(found[i].score, last, 1e-3 * std::abs(last)) << "page " << found[i].page;
    }
  }
  return same;
}

// Both select over the batch; nine lists of ten must be the same.
void ExpectSelectsAlikeBy(QuestScore score, AttentionBatch& batch,
                          const std::vector<PolicyNumbers>& numbers) {
  const PageSelection expected = SelectOnCpu(batch, numbers, 40, score);
  const Lists found = SelectOnGpu(batch, numbers, 40, score);
  int64_t same = 0;
  for (int64_t row = 0; row < expected.num_rows; ++row) {
    SCOPED_TRACE(row);
    const auto r = static_cast<size_t>(row);
    ExpectSameHeader(found.headers[r], expected.header(row));
    same += SameList(found.list(r), expected.list(row), expected.header(row).count) ? 1 : 0;
    for (int32_t i = 0; i < expected.header(row).count; ++i) {
      const SelectionEntry* entry = std::find_if(
          found.list(r), found.list(r) + expected.header(row).count,
          [&](const SelectionEntry& e) { return e.page == expected.list(row)[i].page; });
      if (entry == found.list(r) + expected.header(row).count) continue;
      EXPECT_NEAR(entry->score, expected.list(row)[i].score,
                  1e-4 * std::abs(expected.list(row)[i].score) + 1e-3);
    }
  }
  EXPECT_GE(same * 10, expected.num_rows * 9);
}

void ExpectSelectsAlike(AttentionBatch& batch, const std::vector<PolicyNumbers>& numbers) {
  ExpectSelectsAlikeBy(QuestScore::kBound, batch, numbers);
  ExpectSelectsAlikeBy(QuestScore::kEstimate, batch, numbers);
}

class QuestCudaTest : public SelectorCudaTest {};

INSTANTIATE_TEST_SUITE_P(Shapes, QuestCudaTest,
                         testing::Combine(testing::Values(64, 128),
                                          testing::Values(1, 2, 4, 7, 8, 12),
                                          testing::Values(DType::kFloat32, DType::kBFloat16),
                                          testing::Values(DType::kFloat32, DType::kBFloat16)),
                         CaseName());
INSTANTIATE_TEST_SUITE_P(Codes, QuestCudaTest,
                         testing::Combine(testing::Values(64, 128), testing::Values(4, 7),
                                          testing::Values(DType::kBFloat16),
                                          testing::Values(DType::kFloat8E4M3, DType::kInt8)),
                         CaseName());

TEST_P(QuestCudaTest, SelectsWhatTheCpuSelects) {
  AttentionBatch batch(Shape(), 3, 4096, 41);
  std::vector<PolicyNumbers> numbers;
  const auto add = [&](int64_t slot, int64_t position, int64_t rows, const PolicyNumbers& n) {
    batch.AddBlock(slot, position, rows);
    numbers.push_back(n);
  };
  batch.FillContext(0, 4096);
  batch.FillContext(1, 700);
  batch.FillContext(2, 2111);
  add(0, 4095, 1, {.sink_tokens = 70, .window_tokens = 200, .budget_tokens = 600});
  add(0, 4032, 64, {.sink_tokens = 128, .window_tokens = 64, .budget_tokens = 1024});
  add(1, 699, 1, {.sink_tokens = 70, .window_tokens = 200, .budget_tokens = 600});  // all
  add(1, 640, 7, {.sink_tokens = 0, .window_tokens = 1, .budget_tokens = 64});
  add(2, 2110, 1, {.sink_tokens = 64, .window_tokens = 65, .budget_tokens = 0});
  add(2, 2000, 1,
      {.sink_tokens = 1, .window_tokens = 90, .budget_tokens = 300, .reach_tokens = 63});
  add(0, 5, 1, {.sink_tokens = 2, .window_tokens = 2, .budget_tokens = 1});
  ExpectSelectsAlike(batch, numbers);
}

// All query tiles are one query: the CTAs that choose also score the pages.
TEST_P(QuestCudaTest, InDecodeItSelectsWhatTheCpuSelects) {
  AttentionBatch batch(Shape(), 3, 4096, 46);
  std::vector<PolicyNumbers> numbers;
  const auto add = [&](int64_t slot, int64_t position, const PolicyNumbers& n) {
    batch.AddBlock(slot, position, 1);
    numbers.push_back(n);
  };
  batch.FillContext(0, 4096);
  batch.FillContext(1, 700);
  batch.FillContext(2, 2111);
  batch.kv().Remove(2, 7);
  add(0, 4095, {.sink_tokens = 70, .window_tokens = 200, .budget_tokens = 600});
  add(0, 4032, {.sink_tokens = 128, .window_tokens = 64, .budget_tokens = 1024});
  add(1, 699, {.sink_tokens = 70, .window_tokens = 200, .budget_tokens = 600});  // all
  add(1, 640, {.sink_tokens = 0, .window_tokens = 1, .budget_tokens = 64});
  add(2, 2110, {.sink_tokens = 64, .window_tokens = 65, .budget_tokens = 0});
  add(2, 2000, {.sink_tokens = 1, .window_tokens = 90, .budget_tokens = 300, .reach_tokens = 63});
  // All pages but one, which is absent.
  add(2, 2047, {.sink_tokens = 1, .window_tokens = 64, .budget_tokens = 30 * 64});
  add(0, 5, {.sink_tokens = 2, .window_tokens = 2, .budget_tokens = 1});
  ExpectSelectsAlike(batch, numbers);
}

// Small whole numbers: scores are exact, so that the lists must be the same, and many are equal.
class EqualScores {
 public:
  explicit EqualScores(AttentionShape shape)
      : shape_(OneHead(shape)), batch_(shape_, 1, kPages * kPageTokens, 42) {
    batch_.kv().Grow(0, kPages * kPageTokens);
    for (int64_t page = 0; page < kPages; ++page) {
      std::byte* bounds = batch_.kv().View().Bounds(0, page, 0, 0);
      for (int64_t i = 0; i < 2 * shape_.head_dim; ++i) batch_.kv().Set(bounds, i, 0.0f);
      batch_.kv().Set(bounds, page % 5, static_cast<float>(batch_.rng()() % 4));
      batch_.kv().Set(bounds, shape_.head_dim + page % 7, static_cast<float>(batch_.rng()() % 3));
      if (page % 97 == 0) {
        batch_.kv().Set(bounds, 3, std::numeric_limits<float>::quiet_NaN());
      }
      if (page % 101 == 0) {
        const float infinity = std::numeric_limits<float>::infinity();
        batch_.kv().Set(bounds, shape_.head_dim + 4, page % 2 == 0 ? infinity : -infinity);
      }
    }
  }

  AttentionBatch& batch() { return batch_; }
  // value(element, head, row) of a query.
  template <typename Value>
  void Add(int64_t num_rows, int64_t budget_pages, const Value& value) {
    batch_.AddBlock(0, kPages * kPageTokens - num_rows, num_rows);
    for (int64_t row = batch_.num_tokens() - num_rows; row < batch_.num_tokens(); ++row) {
      for (int64_t head = 0; head < shape_.group; ++head) {
        float* q = batch_.q(row, head);
        for (int64_t i = 0; i < shape_.head_dim; ++i) {
          q[i] = static_cast<float>(value(i, head, row));
        }
      }
    }
    numbers_.push_back(
        {.sink_tokens = 10, .window_tokens = 100, .budget_tokens = budget_pages * kPageTokens});
  }

  void ExpectSameLists() {
    ExpectSameListsBy(QuestScore::kBound);
    ExpectSameListsBy(QuestScore::kEstimate);
  }
  void ExpectSameListsBy(QuestScore score) {
    const PageSelection expected = SelectOnCpu(batch_, numbers_, kPages, score);
    const Lists found = SelectOnGpu(batch_, numbers_, kPages, score);
    for (int64_t row = 0; row < expected.num_rows; ++row) {
      SCOPED_TRACE(row);
      const auto r = static_cast<size_t>(row);
      ExpectSameHeader(found.headers[r], expected.header(row));
      for (int32_t i = 0; i < expected.header(row).count; ++i) {
        ASSERT_EQ(found.list(r)[i].page, expected.list(row)[i].page) << "entry " << i;
        ASSERT_EQ(found.list(r)[i].score, expected.list(row)[i].score) << "entry " << i;
      }
    }
  }

  static int64_t Mixed(int64_t i, int64_t head, int64_t row) {
    return (i * i + head + row) % 3 - 1;
  }
  static int64_t Negative(int64_t, int64_t, int64_t) { return -1; }
  static int64_t Zero(int64_t, int64_t, int64_t) { return 0; }

 private:
  static constexpr int64_t kPages = 2500;  // more than a block has threads
  static AttentionShape OneHead(AttentionShape shape) {
    shape.layer = 0;
    shape.kv_heads = 1;
    return shape;
  }

  const AttentionShape shape_;
  AttentionBatch batch_;
  std::vector<PolicyNumbers> numbers_;
};

constexpr int64_t kPageBudgets[] = {1, 7, 100, 1024, 2000, 2480};

TEST_P(QuestCudaTest, OfEqualScoresTheLaterPagesAreChosen) {
  EqualScores test(Shape());
  for (const int64_t budget : kPageBudgets) test.Add(1, budget, EqualScores::Mixed);
  // Many queries, as many as tiles of them hold and not; no score of the last is above zero.
  for (const int64_t budget : {7, 2000}) test.Add(kPageTokens, budget, EqualScores::Mixed);
  test.Add(19, 900, EqualScores::Negative);
  for (const int64_t row : {3, 40}) {  // these queries count for nothing
    test.batch().q(row, 0)[1] = std::numeric_limits<float>::quiet_NaN();
  }
  test.ExpectSameLists();
}

// With few rows each has a cluster of many CTAs, with many rows a cluster of two, then one CTA.
TEST_P(QuestCudaTest, InDecodeClustersOfAnySizeChooseTheSame) {
  EqualScores test(Shape());
  int64_t row = 0;
  for (const int64_t rows : {1, 12, 60, 140}) {
    SCOPED_TRACE(testing::Message() << rows << " rows");
    for (; row < rows; ++row) {
      const auto value = row % 3 == 0   ? EqualScores::Mixed
                         : row % 3 == 1 ? EqualScores::Negative
                                        : EqualScores::Zero;
      test.Add(1, kPageBudgets[row % std::ssize(kPageBudgets)], value);
    }
    test.batch().q(0, 0)[1] = std::numeric_limits<float>::quiet_NaN();
    test.ExpectSameLists();
  }
}

TEST_P(QuestCudaTest, ARowWithoutRoomGetsTheBest) {
  AttentionBatch batch(Shape(), 1, 2048, 43);
  batch.FillContext(0, 2048);
  batch.AddBlock(0, 2047, 1);
  const PageSelection best = SelectOnCpu(batch, {{0, 1, 5 * 64}}, 5);
  const Lists found = SelectOnGpu(batch, {{0, 1, 9 * 64}}, 5);
  for (int64_t row = 0; row < 2; ++row) {
    ASSERT_EQ(found.headers[static_cast<size_t>(row)].count, 5);
    SameList(found.list(static_cast<size_t>(row)), best.list(row), 5);
  }
}

TEST_P(QuestCudaTest, RefusesWhatItCannotServe) {
  AttentionBatch batch(Shape(), 1, 128, 44);
  batch.FillContext(0, 128);
  batch.AddBlock(0, 127, 1);
  const std::vector<PolicyNumbers> numbers = {{0, 1, 64}};
  CudaSelectParams p = {batch.ParamsForSelect(numbers)};
  PageSelection selection = batch.MakeSelection(1);
  std::byte workspace[1];
  EXPECT_EQ(SelectQuest(QuestScore::kEstimate, p, selection, workspace, nullptr).code(),
            absl::StatusCode::kInvalidArgument)
      << "host memory";
  DeviceMemory memory;
  p.q = memory.Copy(p.q).value();
  p.kv.bounds = nullptr;
  EXPECT_EQ(SelectQuest(QuestScore::kEstimate, p, selection, workspace, nullptr).code(),
            absl::StatusCode::kFailedPrecondition);
  p.tiles = {};
  p.numbers = {};
  p.kv = batch.kv().View();
  selection.num_rows = 0;
  EXPECT_TRUE(SelectQuest(QuestScore::kEstimate, p, selection, nullptr, nullptr).ok())
      << "an empty batch";
}

// Selected and attended to on the device, without the host between.
TEST_P(QuestCudaTest, AttentionReadsTheListsWhereTheyWereWritten) {
  const AttentionShape shape = Shape();
  if (shape.activation != DType::kBFloat16 || shape.kv != DType::kBFloat16) {
    GTEST_SKIP() << "attention on the GPU is of bfloat16";
  }
  AttentionBatch batch(shape, 2, 3000, 45);
  std::vector<PolicyNumbers> numbers;
  for (int64_t slot = 0; slot < 2; ++slot) {
    batch.FillContext(slot, 3000 - slot * 901);
    batch.AddBlock(slot, 2999 - slot * 901, 1);
    numbers.push_back({.sink_tokens = 64, .window_tokens = 128, .budget_tokens = 512});
  }
  SelectOnCpu(batch, numbers, 8);
  const Lists lists = SelectOnGpu(batch, numbers, 8);
  batch.SetSelections(lists.headers, lists.entries);
  batch.Run(
      [](const AttendParams& params, Executor& executor) { AttendReference(params, executor); });
  const int64_t size = batch.num_tokens() * batch.heads() * shape.head_dim;
  const std::vector<float> expected(batch.out(0, 0), batch.out(0, 0) + size);
  batch.SetSelections(std::vector<SelectionHeader>(lists.headers.size()),
                      std::vector<SelectionEntry>(lists.entries.size()));
  DeviceMemory memory;
  const PolicyNumbers* device_numbers = memory.Copy(numbers.data(), numbers.size()).value();
  const absl::Status status = DeviceAttentionBatch(batch).Run(
      [&](const CudaAttendParams& p, const KvTensorMaps& maps) -> absl::Status {
        const int64_t blocks = std::ssize(p.tiles);
        KVASIR_ASSIGN_OR_RETURN(const DeviceBuffer scores,
                                DeviceBuffer::Allocate(QuestWorkspaceBytes(p.kv, blocks)));
        KVASIR_ASSIGN_OR_RETURN(const DeviceBuffer partials,
                                DeviceBuffer::Allocate(AttendDecodeWorkspaceBytes(
                                    p.kv.layout, blocks, batch.shape().group)));
        const CudaSelectParams select = {{.q = p.q,
                                          .kv = p.kv,
                                          .layer = p.layer,
                                          .scale = p.scale,
                                          .tiles = p.tiles,
                                          .numbers = {device_numbers, numbers.size()},
                                          .faults = p.faults}};
        KVASIR_RETURN_IF_ERROR(
            SelectQuest(QuestScore::kEstimate, select, p.selection, scores.data(), nullptr));
        const std::vector<uint32_t> none(static_cast<size_t>(p.selection.num_rows));
        KVASIR_ASSIGN_OR_RETURN(uint32_t * arrivals, memory.Copy(none.data(), none.size()));
        KVASIR_RETURN_IF_ERROR(
            AttendDecode(p, maps, partials.data(), {arrivals, none.size()}, nullptr));
        return CudaStatus(cudaDeviceSynchronize(), "running the kernels");
      });
  ASSERT_TRUE(status.ok()) << status;
  const std::vector<float> found(batch.out(0, 0), batch.out(0, 0) + size);
  EXPECT_TRUE(tests::AllClose(found, expected, {.absolute = 1e-2, .relative = 1e-2},
                              {batch.num_tokens(), batch.heads(), shape.head_dim}));
}

}  // namespace
}  // namespace kvasir::kernels
