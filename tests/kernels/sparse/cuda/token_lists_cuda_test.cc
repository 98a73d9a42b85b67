// The GPU's tokenselect and hip against the CPU's: lists of tokens. The shapes also hold for
// infinitehip_cuda_test.cc.
#include "tests/kernels/sparse/cuda/token_lists_cuda.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <gtest/gtest.h>
#include <limits>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/sparse/common/device_memory.h"
#include "kernels/sparse/hip/hip_cuda.h"
#include "kernels/sparse/hip/hip_selector.h"
#include "kernels/sparse/tokenselect/tokenselect_cuda.h"
#include "kernels/sparse/tokenselect/tokenselect_selector.h"
#include "tests/support/case_name.h"

namespace kvasir::kernels {
namespace {

INSTANTIATE_TEST_SUITE_P(Shapes, LargeGroupsCudaTest,
                         testing::Combine(testing::Values(64, 128), testing::Values(9, 16),
                                          testing::Values(DType::kFloat32, DType::kBFloat16),
                                          testing::Values(DType::kBFloat16)),
                         CaseName());

INSTANTIATE_TEST_SUITE_P(Shapes, TokenListsCudaTest,
                         testing::Combine(testing::Values(64, 128), testing::Values(1, 4, 7, 8),
                                          testing::Values(DType::kFloat32, DType::kBFloat16),
                                          testing::Values(DType::kFloat32, DType::kBFloat16)),
                         CaseName());
INSTANTIATE_TEST_SUITE_P(Codes, TokenListsCudaTest,
                         testing::Combine(testing::Values(64, 128), testing::Values(4, 7),
                                          testing::Values(DType::kBFloat16),
                                          testing::Values(DType::kFloat8E4M3, DType::kInt8)),
                         CaseName());

Lists TokenSelectOnGpu(AttentionBatch& batch, const std::vector<PolicyNumbers>& numbers,
                       int64_t capacity, Scope scope = Scope::kKvGroup) {
  return RunSelectOnGpu(
      batch, numbers, HostLists(batch, capacity).View(),
      TokenSelectWorkspaceBytes(scope, batch.kv().View(), batch.shape().group, std::ssize(numbers)),
      [&](const CudaSelectParams& params, const PageSelection& out, std::byte* workspace) {
        return SelectTokens(scope, params, out, workspace, nullptr);
      });
}

// All heads of a layer have the same list, bit by bit.
void ExpectOneListPerBlock(const Lists& found, size_t heads) {
  for (size_t row = 0; row < found.headers.size(); ++row) {
    SCOPED_TRACE(row);
    const size_t first = row / heads * heads;
    const auto count = static_cast<size_t>(found.headers[first].count);
    ASSERT_EQ(found.headers[row].count, found.headers[first].count);
    EXPECT_EQ(std::memcmp(found.list(row), found.list(first), count * sizeof(SelectionEntry)), 0);
  }
}

TEST_P(TokenListsCudaTest, TokenSelectChoosesWhatTheCpuChooses) {
  AttentionBatch batch(Shape(), 3, 4096, 51);
  batch.FillContext(0, 4096);
  batch.FillContext(1, 700);
  batch.FillContext(2, 2111);
  std::vector<PolicyNumbers> numbers;
  AddBlock(batch, numbers, 0, 4095, 1,
           {.sink_tokens = 70, .window_tokens = 200, .budget_tokens = 600});
  AddBlock(batch, numbers, 0, 4032, 64,
           {.sink_tokens = 128, .window_tokens = 64, .budget_tokens = 999});
  AddBlock(batch, numbers, 1, 699, 1,
           {.sink_tokens = 70, .window_tokens = 200, .budget_tokens = 600});
  AddBlock(batch, numbers, 1, 640, 7, {.sink_tokens = 0, .window_tokens = 1, .budget_tokens = 64});
  AddBlock(batch, numbers, 2, 2110, 1,
           {.sink_tokens = 64, .window_tokens = 65, .budget_tokens = 0});
  AddBlock(batch, numbers, 2, 2000, 1,
           {.sink_tokens = 1, .window_tokens = 90, .budget_tokens = 300, .reach_tokens = 63});
  AddBlock(batch, numbers, 0, 5, 1, {.sink_tokens = 2, .window_tokens = 2, .budget_tokens = 1});
  for (const std::string scope : {"group", "layer"}) {
    SCOPED_TRACE(scope);
    const auto selector = TokenSelectSelector::Create({{"scope", scope}}).value();
    const PageSelection expected = SelectOnCpu(*selector, batch, numbers, 64);
    HostLists cpu(expected);
    const Lists found = TokenSelectOnGpu(batch, numbers, 64, selector->scope());
    ExpectAlike(Compare(found, cpu.View()));
    EXPECT_EQ(std::count(found.faults.begin(), found.faults.end(), 0), 3);
    if (selector->scope() == Scope::kLayer) ExpectOneListPerBlock(found, 2);
  }
}

// All votes are equal, of more tokens than are compared one by one: what counts is their order.
TEST_P(TokenListsCudaTest, TokenSelectTakesTheLaterOfEqualVotes) {
  AttentionShape shape = Shape();
  AttentionBatch batch(shape, 1, 4096, 52);
  batch.FillContext(0, 4096);
  for (const int64_t position : {1023, 4095}) batch.AddBlock(0, position, 1);
  for (int64_t head = 0; head < batch.heads(); ++head) {
    for (int64_t query = 0; query < 2; ++query) {
      std::fill_n(batch.q(query, head), shape.head_dim, 0.0f);
    }
  }
  const PolicyNumbers n = {.sink_tokens = 10, .window_tokens = 100, .budget_tokens = 777};
  for (const Scope scope : {Scope::kKvGroup, Scope::kLayer}) {
    const Lists found = TokenSelectOnGpu(batch, {n, n}, 16, scope);
    for (size_t row = 0; row < 4; ++row) {
      const int64_t window = row < 2 ? 924 : 3996;
      const auto tokens = TokensOf(found.headers[row], found.list(row), &SelectionEntry::live);
      ASSERT_EQ(tokens.size(), 777u);
      EXPECT_EQ(tokens.front(), window - 777);
      EXPECT_EQ(tokens.back(), window - 1);
    }
  }
}

// A token that all heads of a layer give their whole vote has as many as there are heads.
TEST_P(TokenListsCudaTest, TokenSelectCountsTheVotesOfAWholeLayer) {
  AttentionShape shape = Shape();
  shape.kv_heads = 8;
  AttentionBatch batch(shape, 1, 1024, 60);
  batch.FillContext(0, 1024);
  for (int64_t head = 0; head < shape.kv_heads; ++head) {
    for (const int64_t token : {70, 300, 301}) {
      // The logit of half of the heads is infinite for two of the tokens, of the others for one.
      const float infinity = std::numeric_limits<float>::infinity();
      std::byte* key =
          batch.kv().Token(FakePagedKv::Side::kKey, 0, token, AttentionBatch::kLayer, head);
      batch.kv().Set(key, 5, token == 70 ? -infinity : infinity);
    }
  }
  batch.AddBlock(0, 1023, 1);
  for (int64_t head = 0; head < batch.heads(); ++head) {
    float& element = batch.q(0, head)[5];
    element = std::abs(element) * (head % 2 == 0 || shape.group == 1 ? -1.0f : 1.0f);
  }
  const PolicyNumbers n = {.sink_tokens = 10, .window_tokens = 100, .budget_tokens = 2};
  const auto selector = TokenSelectSelector::Create({{"scope", "layer"}}).value();
  const PageSelection expected = SelectOnCpu(*selector, batch, {n}, 2);
  HostLists cpu(expected);
  const Lists found = TokenSelectOnGpu(batch, {n}, 2, Scope::kLayer);
  EXPECT_EQ(Compare(found, cpu.View()).same_rows, shape.kv_heads);
  ExpectOneListPerBlock(found, static_cast<size_t>(shape.kv_heads));
}

// An infinite logit takes all votes of its head, or its share of them; NaN gets none.
TEST_P(TokenListsCudaTest, TokenSelectCountsKeysThatAreNotFinite) {
  AttentionBatch batch(Shape(), 1, 3000, 58);
  batch.FillContext(0, 3000);
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (int64_t head = 0; head < 2; ++head) {
    for (const auto& [token, value] : {std::pair{100, kInfinity},
                                       {101, -kInfinity},
                                       {900, kInfinity},
                                       {901, NAN},
                                       {902, 1e30f}}) {
      std::byte* key =
          batch.kv().Token(FakePagedKv::Side::kKey, 0, token, AttentionBatch::kLayer, head);
      batch.kv().Set(key, 3, value);
    }
  }
  batch.AddBlock(0, 2999, 1);
  batch.AddBlock(0, 2880, 64);
  const PolicyNumbers n = {.sink_tokens = 10, .window_tokens = 100, .budget_tokens = 500};
  for (const std::string scope : {"group", "layer"}) {
    SCOPED_TRACE(scope);
    const auto selector = TokenSelectSelector::Create({{"scope", scope}}).value();
    const PageSelection expected = SelectOnCpu(*selector, batch, {n, n}, 64);
    HostLists cpu(expected);
    ExpectAlike(Compare(TokenSelectOnGpu(batch, {n, n}, 64, selector->scope()), cpu.View()));
  }
}

// The steps of an interval get the list that its first step made.
TEST_P(TokenListsCudaTest, TokenSelectRemembersItsLists) {
  AttentionBatch batch(Shape(), 1, 2048, 59);
  batch.FillContext(0, 2048);
  constexpr int64_t kFirst = 1990;
  for (int64_t step = 0; step < 4; ++step) batch.AddBlock(0, kFirst + step, 1);
  const PolicyNumbers n = {
      .sink_tokens = 10, .window_tokens = 100, .budget_tokens = 300, .reach_tokens = 2};
  constexpr int64_t kCapacity = 64;
  const auto rows = static_cast<size_t>((AttentionBatch::kLayer + 1) * 2);
  DeviceMemory memory;
  const std::vector<RememberedRow> nothing(rows);
  const std::vector<SelectionEntry> no_entries(rows * kCapacity);
  const DeviceSelectionMemory remembered = {
      .rows = memory.Copy(nothing.data(), rows).value(),
      .lists = memory.Copy(no_entries.data(), no_entries.size()).value(),
      .capacity = kCapacity,
      .intervals = {3}};
  const DeviceSelectionMemory* const of_block = memory.Copy(&remembered, 1).value();
  const Lists found = RunSelectOnGpu(
      batch, {n, n, n, n}, HostLists(batch, kCapacity).View(),
      TokenSelectWorkspaceBytes(Scope::kKvGroup, batch.kv().View(), batch.shape().group, 1),
      [&](const CudaSelectParams& params, const PageSelection& out,
          std::byte* workspace) -> absl::Status {
        for (size_t step = 0; step < 4; ++step) {
          CudaSelectParams one = params;
          one.tiles = params.tiles.subspan(step, 1);
          one.numbers = params.numbers.subspan(step, 1);
          one.device_memories = {of_block, 1};
          KVASIR_RETURN_IF_ERROR(SelectTokens(Scope::kKvGroup, one,
                                              out.Rows(static_cast<int64_t>(2 * step), 2),
                                              workspace, nullptr));
        }
        return absl::OkStatus();
      });
  for (size_t head = 0; head < 2; ++head) {
    const auto tokens = [&](size_t step) {
      const size_t row = 2 * step + head;
      return TokensOf(found.headers[row], found.list(row), &SelectionEntry::live);
    };
    for (size_t step = 0; step < 4; ++step) {
      SCOPED_TRACE(step);
      EXPECT_EQ(found.headers[2 * step + head].made_at, kFirst + (step < 3 ? 0 : 3));
      EXPECT_EQ(tokens(step).size(), 300u);
      EXPECT_EQ(tokens(step) == tokens(0), step < 3);
    }
  }
}

TEST_P(TokenListsCudaTest, TokenSelectReportsAbsentPages) {
  AttentionBatch batch(Shape(), 2, 1024, 53);
  batch.FillContext(0, 1024);
  batch.FillContext(1, 1024);
  batch.AddBlock(0, 1023, 1);
  batch.AddBlock(1, 1023, 1);
  batch.kv().SetTier(1, 5, AttentionBatch::kLayer, 1, PageTier::kAbsent);
  const PolicyNumbers n = {.sink_tokens = 10, .window_tokens = 100, .budget_tokens = 77};
  for (const Scope scope : {Scope::kKvGroup, Scope::kLayer}) {
    const Lists found = TokenSelectOnGpu(batch, {n, n}, 77, scope);
    EXPECT_EQ(found.faults[0], 0);
    EXPECT_EQ(found.faults[1], 1);
  }
}

Lists HipOnGpu(AttentionBatch& batch, const std::vector<PolicyNumbers>& numbers, int64_t capacity) {
  HipCuda method;
  for (const PolicyNumbers& n : numbers) {
    method.max_budget_tokens = std::max(method.max_budget_tokens, n.budget_tokens);
  }
  return RunSelectOnGpu(
      batch, numbers, HostLists(batch, capacity).View(),
      HipWorkspaceBytes(method, batch.kv().View(), std::ssize(numbers)),
      [&](const CudaSelectParams& params, const PageSelection& out, std::byte* workspace) {
        return SelectHip(method, params, out, workspace, nullptr);
      });
}

void ExpectHipAlike(const AttentionShape& shape) {
  AttentionBatch batch(shape, 3, 4096, 55);
  batch.FillContext(0, 4096);
  batch.FillContext(1, 700);
  batch.FillContext(2, 2111);
  std::vector<PolicyNumbers> numbers;
  AddBlock(batch, numbers, 0, 4095, 1,
           {.sink_tokens = 70, .window_tokens = 200, .budget_tokens = 600});
  AddBlock(batch, numbers, 0, 4032, 64,
           {.sink_tokens = 128, .window_tokens = 64, .budget_tokens = 999});
  AddBlock(batch, numbers, 1, 699, 1,
           {.sink_tokens = 71, .window_tokens = 200, .budget_tokens = 300});
  AddBlock(batch, numbers, 1, 640, 7, {.sink_tokens = 0, .window_tokens = 1, .budget_tokens = 64});
  AddBlock(batch, numbers, 2, 2110, 1,
           {.sink_tokens = 64, .window_tokens = 65, .budget_tokens = 0});
  AddBlock(batch, numbers, 2, 2000, 1,
           {.sink_tokens = 1, .window_tokens = 90, .budget_tokens = 300, .reach_tokens = 63});
  AddBlock(batch, numbers, 0, 5, 1, {.sink_tokens = 2, .window_tokens = 2, .budget_tokens = 1});
  AddBlock(batch, numbers, 0, 4000, 2, {.sink_tokens = 33, .window_tokens = 5, .budget_tokens = 2});
  // With the window's reach the candidates are fewer than the budget has room for.
  AddBlock(batch, numbers, 1, 650, 1,
           {.sink_tokens = 5, .window_tokens = 640, .budget_tokens = 5, .reach_tokens = 0});
  const PageSelection expected = SelectOnCpu(HipSelector(), batch, numbers, 512);
  HostLists cpu(expected);
  const Lists found = HipOnGpu(batch, numbers, 512);
  ExpectAlike(Compare(found, cpu.View()));
  EXPECT_EQ(std::count(found.faults.begin(), found.faults.end(), 0), 3);
}

TEST_P(TokenListsCudaTest, HipChoosesWhatTheCpuChooses) { ExpectHipAlike(Shape()); }
TEST_P(LargeGroupsCudaTest, HipChoosesWhatTheCpuChooses) { ExpectHipAlike(Shape()); }

// All scores are equal: the later half is kept again and again.
TEST_P(TokenListsCudaTest, HipTakesTheLaterOfEqualHalves) {
  AttentionShape shape = Shape();
  AttentionBatch batch(shape, 1, 1024, 56);
  batch.FillContext(0, 1024);
  batch.AddBlock(0, 1023, 1);
  for (int64_t head = 0; head < batch.heads(); ++head) {
    std::fill_n(batch.q(0, head), shape.head_dim, 0.0f);
  }
  const std::vector<PolicyNumbers> numbers = {
      {.sink_tokens = 10, .window_tokens = 100, .budget_tokens = 78}};
  const PageSelection expected = SelectOnCpu(HipSelector(), batch, numbers, 64);
  HostLists cpu(expected);
  const Lists found = HipOnGpu(batch, numbers, 64);
  EXPECT_EQ(Compare(found, cpu.View()).same_rows, 2);
  EXPECT_EQ(TokensOf(found.headers[0], found.list(0), &SelectionEntry::live).back(), 923);
}

TEST_P(TokenListsCudaTest, HipReportsAbsentPages) {
  AttentionBatch batch(Shape(), 2, 1024, 57);
  batch.FillContext(0, 1024);
  batch.FillContext(1, 1024);
  batch.AddBlock(0, 1023, 1);
  batch.AddBlock(1, 1023, 1);
  batch.kv().SetTier(1, 5, AttentionBatch::kLayer, 1, PageTier::kAbsent);
  const PolicyNumbers n = {.sink_tokens = 10, .window_tokens = 100, .budget_tokens = 77};
  const Lists found = HipOnGpu(batch, {n, n}, 77);
  EXPECT_EQ(found.faults[0], 0);
  EXPECT_EQ(found.faults[1], 1);
}

}  // namespace
}  // namespace kvasir::kernels
