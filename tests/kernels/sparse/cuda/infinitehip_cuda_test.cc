// The GPU's infinitehip against the CPU's.
#include "kernels/sparse/infinitehip/infinitehip_cuda.h"

#include <algorithm>
#include <cmath>
#include <gtest/gtest.h>
#include <limits>
#include <utility>
#include <vector>

#include "kernels/append/key_codes.h"
#include "tests/kernels/sparse/cuda/token_lists_cuda.h"

namespace kvasir::kernels {
namespace {

Lists InfiniteHipOnGpu(AttentionBatch& batch, const std::vector<PolicyNumbers>& numbers,
                       const InfiniteHipCuda& method, int64_t capacity) {
  return RunSelectOnGpu(
      batch, numbers, HostLists(batch, capacity).View(),
      InfiniteHipWorkspaceBytes(method, batch.kv().View(), std::ssize(numbers)),
      [&](const CudaSelectParams& params, const PageSelection& out, std::byte* workspace) {
        return SelectInfiniteHip(method, params, out, workspace, nullptr);
      });
}

// Both select over the batch, by some presets.
void ExpectInfiniteHipAlike(AttentionBatch& batch, const std::vector<PolicyNumbers>& numbers) {
  for (const auto& [preset, scope] :
       {std::pair("3k", "group"), std::pair("5k", "group"), std::pair("5k", "layer")}) {
    SCOPED_TRACE(testing::Message() << preset << ", scope " << scope);
    const auto selector =
        InfiniteHipSelector::Create({{"preset", preset}, {"scope", scope}}).value();
    const InfiniteHipCuda method = {.preset = InfiniteHipSelector::FindPreset(preset).value(),
                                    .max_budget_tokens = 2048,
                                    .scope = selector->scope()};
    const PageSelection expected = SelectOnCpu(*selector, batch, numbers, 512);
    HostLists cpu(expected);
    ExpectAlike(Compare(InfiniteHipOnGpu(batch, numbers, method, 512), cpu.View()));
    // Room for more chunks than shared memory has.
    InfiniteHipCuda large = method;
    large.max_budget_tokens = 70'000;
    ExpectAlike(Compare(InfiniteHipOnGpu(batch, numbers, large, 512), cpu.View()));
  }
}

// Rows of two texts, long enough that every stage has to choose; chunks begin within a page and at
// its begin. One block has `rows` queries, the others one each.
void ExpectInfiniteHipAlikeInLongTexts(const AttentionShape& shape, uint64_t seed, int64_t rows) {
  constexpr int64_t kTokens = 40'000;
  AttentionBatch batch(shape, 2, kTokens, seed);
  batch.FillContext(0, kTokens);
  batch.FillContext(1, 9'001);
  std::vector<PolicyNumbers> numbers;
  AddBlock(batch, numbers, 0, kTokens - 1, 1,
           {.sink_tokens = 130, .window_tokens = 512, .budget_tokens = 1024});
  AddBlock(batch, numbers, 0, 39'936, rows,
           {.sink_tokens = 128, .window_tokens = 600, .budget_tokens = 2048});
  AddBlock(batch, numbers, 1, 9'000, 1,
           {.sink_tokens = 1, .window_tokens = 520, .budget_tokens = 100});
  AddBlock(batch, numbers, 1, 500, 1,
           {.sink_tokens = 1, .window_tokens = 520, .budget_tokens = 100});
  ExpectInfiniteHipAlike(batch, numbers);
}

TEST_P(TokenListsCudaTest, InfiniteHipChoosesWhatTheCpuChooses) {
  ExpectInfiniteHipAlikeInLongTexts(Shape(), 54, 64);
}

// All query tiles are one query: the kernel that chooses also scores pages for the first stage.
TEST_P(TokenListsCudaTest, InDecodeInfiniteHipChoosesWhatTheCpuChooses) {
  ExpectInfiniteHipAlikeInLongTexts(Shape(), 60, 1);
}

TEST_P(LargeGroupsCudaTest, InfiniteHipChoosesWhatTheCpuChooses) {
  ExpectInfiniteHipAlikeInLongTexts(Shape(), 64, 64);
  ExpectInfiniteHipAlikeInLongTexts(Shape(), 65, 1);
}

// The rows are so numerous that each has few CTAs. Some tiles have `rows` queries, the others one.
void ExpectInfiniteHipAlikeInManyRows(const AttentionShape& shape, int64_t rows) {
  constexpr int64_t kTokens = 9'001;
  AttentionBatch batch(shape, 1, kTokens, 62);
  batch.FillContext(0, kTokens);
  std::vector<PolicyNumbers> numbers;
  for (int64_t i = 0; i < 66; ++i) {
    AddBlock(batch, numbers, 0, kTokens - 80 + i, i % 16 == 4 ? rows : 1,
             {.sink_tokens = 1 + i, .window_tokens = 520, .budget_tokens = 100 + i});
  }
  const auto selector = InfiniteHipSelector::Create({}).value();
  const InfiniteHipCuda method = {.preset = InfiniteHipSelector::FindPreset("3k").value(),
                                  .max_budget_tokens = 200};
  const PageSelection expected = SelectOnCpu(*selector, batch, numbers, 64);
  HostLists cpu(expected);
  ExpectAlike(Compare(InfiniteHipOnGpu(batch, numbers, method, 64), cpu.View()));
}

TEST_P(TokenListsCudaTest, InfiniteHipServesManyRows) {
  ExpectInfiniteHipAlikeInManyRows(Shape(), 3);
}

TEST_P(TokenListsCudaTest, InDecodeInfiniteHipServesManyRows) {
  ExpectInfiniteHipAlikeInManyRows(Shape(), 1);
}

// Keys that are NaN in part have no score; infinite ones are as large as codes can tell. One block
// has `rows` queries; its first query is NaN for one head.
void ExpectInfiniteHipAlikeWithoutNumbers(const AttentionShape& shape, int64_t rows) {
  constexpr int64_t kTokens = 9'001;
  AttentionBatch batch(shape, 1, kTokens, 63);
  batch.FillContext(0, kTokens);
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (int64_t head = 0; head < 2; ++head) {
    for (int64_t token = 0; token < 8'400; ++token) {
      if (token / 8 % 3 != 1 && token % 97 != 0) continue;
      std::byte* key =
          batch.kv().Token(FakePagedKv::Side::kKey, 0, token, AttentionBatch::kLayer, head);
      batch.kv().Set(key, 5, token % 97 == 0 ? kInfinity : NAN);
    }
  }
  for (int64_t block = 0; block < CeilPages(kTokens); ++block) {
    const int64_t count = std::min(kPageTokens, kTokens - block * kPageTokens);
    ASSERT_TRUE(RebuildKeyCodes(batch.kv().View(), 0, block, count).ok());
  }
  std::vector<PolicyNumbers> numbers;
  AddBlock(batch, numbers, 0, kTokens - 1, 1,
           {.sink_tokens = 3, .window_tokens = 520, .budget_tokens = 2000});
  AddBlock(batch, numbers, 0, 8'960, rows,
           {.sink_tokens = 9, .window_tokens = 520, .budget_tokens = 900});
  batch.q(1, 1)[3] = NAN;
  const auto selector = InfiniteHipSelector::Create({}).value();
  const InfiniteHipCuda method = {.preset = InfiniteHipSelector::FindPreset("3k").value(),
                                  .max_budget_tokens = 2000};
  const PageSelection expected = SelectOnCpu(*selector, batch, numbers, 512);
  HostLists cpu(expected);
  ExpectAlike(Compare(InfiniteHipOnGpu(batch, numbers, method, 512), cpu.View()));
}

TEST_P(TokenListsCudaTest, InfiniteHipLeavesOutWhatIsNotANumber) {
  ExpectInfiniteHipAlikeWithoutNumbers(Shape(), 41);
}

TEST_P(TokenListsCudaTest, InDecodeInfiniteHipLeavesOutWhatIsNotANumber) {
  ExpectInfiniteHipAlikeWithoutNumbers(Shape(), 1);
}

}  // namespace
}  // namespace kvasir::kernels
