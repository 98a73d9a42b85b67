// Selecting and pruning on the GPU where keys are cached un-rotated, against the CPU's.
#include <algorithm>
#include <cmath>
#include <gtest/gtest.h>
#include <limits>
#include <tuple>
#include <vector>

#include "kernels/paged/compact_positions_cuda.h"
#include "kernels/rope/rope_positions_cuda.h"
#include "kernels/sparse/hip/hip_cuda.h"
#include "kernels/sparse/hip/hip_selector.h"
#include "kernels/sparse/infinitehip/infinitehip_cuda.h"
#include "kernels/sparse/quest/quest_cuda.h"
#include "kernels/sparse/quest/quest_selector.h"
#include "kernels/sparse/streaming/streaming_cuda.h"
#include "kernels/sparse/streaming/streaming_selector.h"
#include "kernels/sparse/tokenselect/tokenselect_cuda.h"
#include "kernels/sparse/tokenselect/tokenselect_selector.h"
#include "kernels/sparse/top_p/top_p_cuda.h"
#include "kernels/sparse/top_p/top_p_pruner.h"
#include "tests/support/case_name.h"
#include "tests/support/device_select.h"

namespace kvasir::kernels {
namespace {

constexpr int64_t kCapacity = 64;
constexpr int64_t kMaxTokens = 4096;

class CompactSelectCudaTest : public SelectorCudaTest {
 protected:
  // Queries that are rounded where the CPU's are not make other tokens the last ones.
  static int64_t MostOthersInAThousand() {
    return std::get<2>(GetParam()) == DType::kFloat32 ? 1 : 20;
  }

  static std::vector<PolicyNumbers> AddRows(AttentionBatch& batch) {
    std::vector<PolicyNumbers> numbers;
    const auto add = [&](int64_t slot, int64_t position, int64_t rows, const PolicyNumbers& n) {
      batch.AddBlock(slot, position, rows);
      numbers.push_back(n);
    };
    batch.UseCompactPositions(1.25);
    batch.FillContext(0, 4096);
    batch.FillContext(1, 2111);
    add(0, 4095, 1, {.sink_tokens = 70, .window_tokens = 200, .budget_tokens = 600, .top_p = 0.6f});
    add(0, 4032, 64, {.sink_tokens = 128, .window_tokens = 64, .budget_tokens = 1024});
    add(1, 2110, 1, {.sink_tokens = 64, .window_tokens = 130, .budget_tokens = 500, .top_p = 0.9f});
    add(1, 2048, 7, {.sink_tokens = 0, .window_tokens = 1, .budget_tokens = 64});
    add(0, 5, 1, {.sink_tokens = 2, .window_tokens = 2, .budget_tokens = 1});
    return numbers;
  }

  static HostLists SelectOnCpu(const Selector& selector, AttentionBatch& batch,
                               const std::vector<PolicyNumbers>& numbers,
                               int64_t capacity = kCapacity) {
    PageSelection selection = batch.MakeSelection(capacity);
    SerialExecutor executor;
    const absl::Status status =
        selector.Select(batch.ParamsForSelect(numbers), selection, executor);
    EXPECT_TRUE(status.ok()) << status;
    AssignPositions(selection);
    return HostLists(selection);
  }

  // Selects with queries that were rotated before, and gives positions.
  static DeviceSelect Placed(const QueryDistance& distance, const DeviceSelect& select) {
    return [=](const CudaSelectParams& params, const PageSelection& out,
               std::byte* workspace) -> absl::Status {
      KVASIR_ASSIGN_OR_RETURN(const DeviceBuffer queries,
                              DeviceBuffer::Allocate(params.q.size_bytes()));
      CudaSelectParams placed = params;
      placed.q = TensorView(queries.data(), params.q.dtype(),
                            {params.q.dim(0), params.q.dim(1), params.q.dim(2)}, Device::kCuda);
      placed.device_rope = {};
      KVASIR_RETURN_IF_ERROR(RotateToDistance(params, distance, placed.q, nullptr));
      KVASIR_RETURN_IF_ERROR(select(placed, out, workspace));
      KVASIR_RETURN_IF_ERROR(AssignPositions(out, nullptr));
      return CudaStatus(cudaDeviceSynchronize(), "running the kernels");
    };
  }

  // A page that only the GPU chose is as good as the last one of the CPU.
  static void ExpectPagesAsGood(const Lists& found, HostLists expected) {
    for (size_t row = 0; row < expected.headers.size(); ++row) {
      SCOPED_TRACE(row);
      const SelectionEntry* const list = expected.View().list(static_cast<int64_t>(row));
      float last = std::numeric_limits<float>::infinity();
      for (int32_t i = 0; i < expected.headers[row].count; ++i) {
        last = std::min(last, list[i].score);
      }
      for (int32_t i = 0; i < found.headers[row].count; ++i) {
        EXPECT_GE(found.list(row)[i].score, last - 0.01f * std::abs(last)) << "entry " << i;
      }
    }
  }

  // Few of the lists' tokens differ, and positions are those of the lists.
  static void ExpectAlike(const Lists& found, HostLists expected,
                          int64_t most_others_in_a_thousand = MostOthersInAThousand()) {
    int64_t tokens = 0, others = 0;
    for (size_t row = 0; row < expected.headers.size(); ++row) {
      SCOPED_TRACE(row);
      const PageSelection view = expected.View();
      const SelectionHeader& header = found.headers[row];
      EXPECT_EQ(header.kind, expected.headers[row].kind);
      EXPECT_EQ(header.sink_end, expected.headers[row].sink_end);
      EXPECT_EQ(header.window_begin, expected.headers[row].window_begin);
      const auto left = TokensOf(header, found.list(row), &SelectionEntry::live);
      const auto right = TokensOf(expected.headers[row], view.list(static_cast<int64_t>(row)),
                                  &SelectionEntry::live);
      EXPECT_EQ(left.size(), right.size());
      std::vector<int64_t> both;
      std::set_intersection(left.begin(), left.end(), right.begin(), right.end(),
                            std::back_inserter(both));
      tokens += std::ssize(right);
      others += std::ssize(right) - std::ssize(both);
      SelectionHeader own = header;
      std::vector<SelectionEntry> list(found.list(row), found.list(row) + header.count);
      AssignPositions({.headers = &own, .entries = list.data(), .num_rows = 1, .capacity = 0});
      EXPECT_EQ(header.compact_length, own.compact_length);
      for (size_t i = 0; i < list.size(); ++i) {
        EXPECT_EQ(found.list(row)[i].pos0, list[i].pos0) << "entry " << i;
      }
    }
    EXPECT_GT(tokens, 0) << "nothing was selected";
    EXPECT_LE(others * 1000, most_others_in_a_thousand * tokens) << others << " of " << tokens;
  }
};

INSTANTIATE_TEST_SUITE_P(Shapes, CompactSelectCudaTest,
                         testing::Combine(testing::Values(64, 128), testing::Values(1, 4, 8),
                                          testing::Values(DType::kFloat32, DType::kBFloat16),
                                          testing::Values(DType::kBFloat16)),
                         CaseName());
INSTANTIATE_TEST_SUITE_P(Codes, CompactSelectCudaTest,
                         testing::Combine(testing::Values(64, 128), testing::Values(4, 7),
                                          testing::Values(DType::kBFloat16),
                                          testing::Values(DType::kFloat8E4M3, DType::kInt8)),
                         CaseName());

TEST_P(CompactSelectCudaTest, QuestSelectsWhatTheCpuSelects) {
  AttentionBatch batch(Shape(), 2, 4096, 71);
  const std::vector<PolicyNumbers> numbers = AddRows(batch);
  const HostLists expected = SelectOnCpu(QuestSelector(), batch, numbers);
  const DeviceSelect select = [](const CudaSelectParams& params, const PageSelection& out,
                                 std::byte* workspace) {
    return SelectQuest(QuestScore::kEstimate, params, out, workspace, nullptr);
  };
  const Lists found = RunSelectOnGpu(batch, numbers, HostLists(batch, kCapacity).View(),
                                     QuestWorkspaceBytes(batch.kv().View(), std::ssize(numbers)),
                                     Placed({}, select));
  ExpectPagesAsGood(found, expected);
  // Two of 70 pages may differ.
  ExpectAlike(found, expected, 2 * MostOthersInAThousand());
}

TEST_P(CompactSelectCudaTest, TokenSelectSelectsWhatTheCpuSelects) {
  AttentionBatch batch(Shape(), 2, 4096, 72);
  const std::vector<PolicyNumbers> numbers = AddRows(batch);
  const HostLists expected = SelectOnCpu(*TokenSelectSelector::Create({}).value(), batch, numbers);
  const DeviceSelect select = [](const CudaSelectParams& params, const PageSelection& out,
                                 std::byte* workspace) {
    return SelectTokens(Scope::kKvGroup, params, out, workspace, nullptr);
  };
  ExpectAlike(RunSelectOnGpu(batch, numbers, HostLists(batch, kCapacity).View(),
                             TokenSelectWorkspaceBytes(Scope::kKvGroup, batch.kv().View(),
                                                       batch.shape().group, std::ssize(numbers)),
                             Placed({}, select)),
              expected);
}

TEST_P(CompactSelectCudaTest, HipSelectsWhatTheCpuSelects) {
  constexpr int64_t kRoom = 512;
  AttentionBatch batch(Shape(), 2, 4096, 76);
  const std::vector<PolicyNumbers> numbers = AddRows(batch);
  const HostLists expected = SelectOnCpu(HipSelector(), batch, numbers, kRoom);
  const HipCuda method = {.max_budget_tokens = 1024};
  const DeviceSelect select = [&](const CudaSelectParams& params, const PageSelection& out,
                                  std::byte* workspace) {
    return SelectHip(method, params, out, workspace, nullptr);
  };
  ExpectAlike(RunSelectOnGpu(batch, numbers, HostLists(batch, kRoom).View(),
                             HipWorkspaceBytes(method, batch.kv().View(), std::ssize(numbers)),
                             Placed({}, select)),
              expected);
}

// A layer in which chunks stand side by side, and one in which they do not. Long enough that every
// stage has to choose.
TEST_P(CompactSelectCudaTest, InfiniteHipSelectsWhatTheCpuSelects) {
  constexpr int64_t kTokens = 40'000;
  for (const int64_t layer : {1, 3}) {
    SCOPED_TRACE(layer);
    AttentionShape shape = Shape();
    shape.layer = layer;
    shape.kv_heads = 1;
    AttentionBatch batch(shape, 1, kTokens, 73);
    batch.UseCompactPositions(1.25);
    batch.FillContext(0, kTokens);
    std::vector<PolicyNumbers> numbers;
    batch.AddBlock(0, kTokens - 1, 1);
    numbers.push_back({.sink_tokens = 130, .window_tokens = 512, .budget_tokens = 1024});
    batch.AddBlock(0, 39'936, 64);
    numbers.push_back({.sink_tokens = 128, .window_tokens = 600, .budget_tokens = 2048});
    for (const absl::string_view preset : {"3k", "5k"}) {
      SCOPED_TRACE(preset);
      const auto selector = InfiniteHipSelector::Create({{"preset", std::string(preset)}}).value();
      const InfiniteHipCuda method = {.preset = InfiniteHipSelector::FindPreset(preset).value(),
                                      .max_budget_tokens = 2048};
      const HostLists expected = SelectOnCpu(*selector, batch, numbers, 512);
      const DeviceSelect select = [&](const CudaSelectParams& params, const PageSelection& out,
                                      std::byte* workspace) {
        return SelectInfiniteHip(method, params, out, workspace, nullptr);
      };
      const DeviceSelect indexed = [&](const CudaSelectParams& params, const PageSelection& out,
                                       std::byte* workspace) -> absl::Status {
        KVASIR_RETURN_IF_ERROR(select(params, out, workspace));
        return AssignPositions(out, nullptr);
      };
      ExpectAlike(
          RunSelectOnGpu(batch, numbers, HostLists(batch, 512).View(),
                         InfiniteHipWorkspaceBytes(method, batch.kv().View(), std::ssize(numbers)),
                         InfiniteHipSelector::IsChunkIndexed(layer)
                             ? indexed
                             : Placed(method.distance(), select)),
          expected);
    }
  }
}

TEST_P(CompactSelectCudaTest, StreamingHasSinkAndWindow) {
  AttentionBatch batch(Shape(), 2, 4096, 74);
  const std::vector<PolicyNumbers> numbers = AddRows(batch);
  const HostLists expected = SelectOnCpu(StreamingSelector(), batch, numbers, 0);
  const Lists found = RunSelectOnGpu(
      batch, numbers, HostLists(batch, 0).View(), 1,
      [](const CudaSelectParams& params, const PageSelection& out, std::byte*) -> absl::Status {
        KVASIR_RETURN_IF_ERROR(SelectStreaming(params, out, nullptr));
        return AssignPositions(out, nullptr);
      });
  for (size_t row = 0; row < expected.headers.size(); ++row) {
    SCOPED_TRACE(row);
    ExpectSameHeader(found.headers[row], expected.headers[row]);
    EXPECT_EQ(found.headers[row].compact_length, expected.headers[row].compact_length);
  }
}

// Estimates are made at the positions at which attention reads.
TEST_P(CompactSelectCudaTest, TopPKeepsWhatTheCpuKeeps) {
  AttentionBatch batch(Shape(), 2, 4096, 75);
  const std::vector<PolicyNumbers> numbers = AddRows(batch);
  HostLists selected = SelectOnCpu(*TokenSelectSelector::Create({}).value(), batch, numbers);
  HostLists expected = selected;
  SerialExecutor executor;
  PageSelection view = expected.View();
  ASSERT_TRUE(TopPPruner().Prune(batch.ParamsForSelect(numbers), view, executor).ok());
  const Lists found = RunSelectOnGpu(
      batch, numbers, selected.View(),
      TopPWorkspaceBytes(batch.kv().View().layout, batch.shape().group, std::ssize(numbers),
                         kCapacity, kMaxTokens),
      [](const CudaSelectParams& params, const PageSelection& out, std::byte* workspace) {
        return PruneTopP(params, out, kMaxTokens, workspace, nullptr);
      });
  int64_t chosen = 0, kept = 0, others = 0;
  for (size_t row = 0; row < expected.headers.size(); ++row) {
    const SelectionEntry* list = view.list(static_cast<int64_t>(row));
    const auto left = TokensOf(found.headers[row], found.list(row), &SelectionEntry::live);
    const auto right = TokensOf(expected.headers[row], list, &SelectionEntry::live);
    std::vector<int64_t> differing;
    std::set_symmetric_difference(left.begin(), left.end(), right.begin(), right.end(),
                                  std::back_inserter(differing));
    chosen += std::ssize(TokensOf(expected.headers[row], list, &SelectionEntry::chosen));
    kept += std::ssize(right);
    others += std::ssize(differing);
  }
  EXPECT_LT(kept, chosen) << "nothing was pruned";
  EXPECT_LE(others * 1000, chosen) << "weights as good as the threshold";
}

TEST_P(CompactSelectCudaTest, KernelsThatRotateNothingRefuseQueriesThatAreNot) {
  AttentionBatch batch(Shape(), 2, 4096, 76);
  const std::vector<PolicyNumbers> numbers = AddRows(batch);
  SelectOnCpu(QuestSelector(), batch, numbers);  // angles are known
  RunSelectOnGpu(
      batch, numbers, HostLists(batch, kCapacity).View(), 1,
      [](const CudaSelectParams& params, const PageSelection& out, std::byte* workspace) {
        EXPECT_EQ(SelectQuest(QuestScore::kEstimate, params, out, workspace, nullptr).code(),
                  absl::StatusCode::kInvalidArgument);
        EXPECT_EQ(SelectTokens(Scope::kKvGroup, params, out, workspace, nullptr).code(),
                  absl::StatusCode::kInvalidArgument);
        return absl::OkStatus();
      });
}

// Also when the table has grown.
TEST(CudaRopePositions, KnowsTheAnglesOfTheCpu) {
  if (!HasGpu()) GTEST_SKIP() << "no GPU on this machine";
  const std::vector<double> inv_freq = {1, 0.3, 0.01, 0.002};
  CudaRopePositions positions = CudaRopePositions::Create(inv_freq, 1.5).value();
  EXPECT_FALSE(positions.view().on());
  RopePositions expected(inv_freq, 1.5);
  SerialExecutor executor;
  for (const int64_t end : {1, 1024, 1025, 5000, 700}) {
    ASSERT_TRUE(positions.Reserve(end, nullptr).ok());
    const DeviceRopePositions view = positions.view();
    ASSERT_GE(view.end, end);
    EXPECT_EQ(view.attention_scaling, 1.5f);
    expected.Reserve(view.end, executor);
    std::vector<float> angles(static_cast<size_t>(view.end) * inv_freq.size());
    for (const auto& [from, of] :
         {std::pair(view.cos, expected.cos(0)), std::pair(view.sin, expected.sin(0))}) {
      ASSERT_TRUE(DeviceMemory::Fetch(from, angles.data(), angles.size() * sizeof(float)).ok());
      for (size_t i = 0; i < angles.size(); ++i) ASSERT_NEAR(angles[i], of[i], 2e-7f) << i;
    }
  }
}

}  // namespace
}  // namespace kvasir::kernels
