// Selectors and the pruner on the GPU begin while the kernel ahead of them runs. They read its
// output, queries and the pages of the step's tokens, only after it has ended.
#include <gtest/gtest.h>
#include <tuple>
#include <vector>

#include "kernels/sparse/quest/quest_selector.h"
#include "kernels/sparse/top_p/top_p_cuda.h"
#include "tests/support/case_name.h"
#include "tests/support/device_methods.h"
#include "tests/support/late_bytes.h"

namespace kvasir::kernels {
namespace {

// More than infinitehip's first stage keeps. The step has two tokens, the last of a page and the
// first of the next.
constexpr int64_t kContext = 33'473;
constexpr int64_t kNewestPage = (kContext - 1) / kPageTokens;
static_assert((kContext - 1) % kPageTokens == 0);
constexpr int64_t kRows = 2;
constexpr int64_t kCapacity = 600;  // pages of a list
constexpr int64_t kBudget = 4096;

// Head_dim, query heads of a KV head. In bfloat16, where kernels of decode have paths of their own.
class LateInputsCudaTest : public testing::TestWithParam<std::tuple<int64_t, int64_t>> {
 protected:
  LateInputsCudaTest()
      : batch_({.activation = DType::kBFloat16,
                .kv = DType::kBFloat16,
                .head_dim = std::get<0>(GetParam()),
                .kv_heads = 2,
                .group = std::get<1>(GetParam())},
               1, kContext, 91) {}

  void SetUp() override {
    if (!HasGpu()) GTEST_SKIP() << "no GPU on this machine";
    ASSERT_EQ(cudaStreamCreate(&stream_), cudaSuccess);
    batch_.FillContext(0, kContext);
    MakeLargest(kNewestPage - 1);
    for (int64_t row = 0; row < kRows; ++row) batch_.AddBlock(0, kContext - kRows + row, 1);
  }
  void TearDown() override {
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }

  // Keys that every selection has among its best.
  void MakeLargest(int64_t page) {
    for (int64_t token = page * kPageTokens; token < (page + 1) * kPageTokens; ++token) {
      for (int64_t head = 0; head < 2; ++head) {
        std::byte* key =
            batch_.kv().Token(FakePagedKv::Side::kKey, 0, token, AttentionBatch::kLayer, head);
        for (int64_t i = 0; i < batch_.shape().head_dim; ++i) {
          batch_.kv().Set(key, i, static_cast<float>((token + i * i) % 9 - 4) * 4);
        }
      }
    }
    ASSERT_TRUE(RebuildBounds(batch_.kv().View(), 0, page, kPageTokens).ok());
    ASSERT_TRUE(RebuildKeyCodes(batch_.kv().View(), 0, page, kPageTokens).ok());
  }

  std::vector<PolicyNumbers> Numbers(int64_t window_tokens) const {
    return std::vector<PolicyNumbers>(kRows, {.sink_tokens = 1,
                                              .window_tokens = window_tokens,
                                              .budget_tokens = kBudget,
                                              .top_p = 0.6f});
  }

  // Lists of late inputs are those of inputs in time. `selection`: what the lists begin as.
  Lists ExpectNothingIsReadEarly(const DeviceMethod& method,
                                 const std::vector<PolicyNumbers>& numbers,
                                 const PageSelection& selection) {
    const Lists expected = Run(method, numbers, selection, nullptr);
    LateBytes late;
    const Lists found = Run(method, numbers, selection, &late);
    for (size_t row = 0; row < found.headers.size(); ++row) {
      SCOPED_TRACE(row);
      ExpectSameHeader(found.headers[row], expected.headers[row]);
      EXPECT_EQ(TokensOf(found.headers[row], found.list(row), &SelectionEntry::live),
                TokensOf(expected.headers[row], expected.list(row), &SelectionEntry::live));
    }
    return expected;
  }

  AttentionBatch batch_;
  cudaStream_t stream_ = nullptr;

 private:
  Lists Run(const DeviceMethod& method, const std::vector<PolicyNumbers>& numbers,
            const PageSelection& selection, LateBytes* late) {
    const auto select = [&](const CudaSelectParams& params, const PageSelection& out,
                            std::byte* workspace) -> absl::Status {
      // Data of an earlier run would hide a read before the write.
      cudaMemset(workspace, 0xff, static_cast<size_t>(method.workspace_bytes));
      if (late != nullptr) KVASIR_RETURN_IF_ERROR(HoldInputs(params, *late));
      KVASIR_RETURN_IF_ERROR(method.select(params, out, workspace));
      return CudaStatus(cudaStreamSynchronize(stream_), "selecting");
    };
    return RunSelectOnGpu(batch_, numbers, selection, method.workspace_bytes, select);
  }
  // Holds back the inputs of the step's tokens: queries, and all that is kept of their pages.
  absl::Status HoldInputs(const CudaSelectParams& params, LateBytes& late) {
    const KvLayout& layout = params.kv.layout;
    KVASIR_RETURN_IF_ERROR(late.Hold(params.q.data(), static_cast<size_t>(params.q.size_bytes())));
    for (const int64_t page : {kNewestPage - 1, kNewestPage}) {
      const int64_t row = batch_.kv().View().extent(0, page);
      std::byte* bounds = nullptr;
      std::byte* codes = nullptr;
      KVASIR_RETURN_IF_ERROR(DeviceMemory::Fetch(params.kv.bounds + row, &bounds, sizeof(bounds)));
      KVASIR_RETURN_IF_ERROR(DeviceMemory::Fetch(params.kv.key_codes + row, &codes, sizeof(codes)));
      KVASIR_RETURN_IF_ERROR(late.Hold(bounds, static_cast<size_t>(layout.block_bounds_bytes())));
      KVASIR_RETURN_IF_ERROR(late.Hold(codes, static_cast<size_t>(layout.block_key_codes_bytes())));
      std::vector<PageRef> pages(static_cast<size_t>(layout.pages_per_block()));
      KVASIR_RETURN_IF_ERROR(DeviceMemory::Fetch(params.kv.pages + row * layout.pages_per_block(),
                                                 pages.data(), pages.size() * sizeof(PageRef)));
      for (const PageRef& ref : pages) {
        KVASIR_RETURN_IF_ERROR(late.Hold(ref.page(), static_cast<size_t>(layout.page_bytes())));
      }
    }
    return late.PutBack(stream_);
  }
};

INSTANTIATE_TEST_SUITE_P(Shapes, LateInputsCudaTest,
                         testing::Values(std::tuple(64, 4), std::tuple(128, 8)), CaseName());

TEST_P(LateInputsCudaTest, SelectorsWait) {
  const std::vector<DeviceMethodOptions> methods = {
      {.selector = "quest"},
      {.selector = "tokenselect"},
      {.selector = "tokenselect", .scope = Scope::kLayer},
      {.selector = "hip"},
      {.selector = "infinitehip", .preset = "3k"},
      {.selector = "infinitehip", .preset = "3k", .scope = Scope::kLayer}};
  for (DeviceMethodOptions options : methods) {
    SCOPED_TRACE(options.selector + (options.scope == Scope::kLayer ? ", layer" : ""));
    options.tiles = kRows;
    options.max_budget_tokens = kBudget;
    options.stream = stream_;
    const int64_t window_tokens = options.selector == "infinitehip" ? 512 : 1;
    const Lists lists = ExpectNothingIsReadEarly(
        MakeDeviceMethod(options, batch_.kv().View(), batch_.shape().group), Numbers(window_tokens),
        HostLists(batch_, kCapacity).View());
    if (options.selector != "quest") continue;
    for (size_t row = 2; row < 4; ++row) {  // of the second token: before it lies a late page
      const auto last = static_cast<size_t>(lists.headers[row].count - 1);
      EXPECT_EQ(lists.list(row)[last].page, kNewestPage - 1) << "premise: row " << row;
    }
  }
}

TEST_P(LateInputsCudaTest, TopPWaits) {
  const std::vector<PolicyNumbers> numbers = Numbers(/*window_tokens=*/128);
  PageSelection selection = batch_.MakeSelection(kCapacity);
  SerialExecutor executor;
  ASSERT_TRUE(QuestSelector().Select(batch_.ParamsForSelect(numbers), selection, executor).ok());
  HostLists lists(selection);
  const KvLayout layout = batch_.kv().View().layout;
  const DeviceMethod top_p = {
      TopPWorkspaceBytes(layout, batch_.shape().group, kRows, kCapacity, kContext),
      [this](const CudaSelectParams& params, const PageSelection& out, std::byte* memory) {
        return PruneTopP(params, out, kContext, memory, stream_);
      }};
  ExpectNothingIsReadEarly(top_p, numbers, lists.View());
}

}  // namespace
}  // namespace kvasir::kernels
