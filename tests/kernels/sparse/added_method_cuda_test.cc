// Adding a method to the GPU takes the same folder (newest/) and two lines of
// kernels/sparse/methods_cuda.cc: its header and its name. Nothing of the worker names a method, so
// a selector that is found by name here is served there.
#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <set>
#include <string>
#include <vector>

#include "kernels/sparse/methods.h"
#include "kernels/sparse/methods_cuda.h"
#include "kernels/sparse/policy.h"
#include "tests/support/attention_batch.h"
#include "tests/support/device_select.h"

namespace kvasir::kernels {
namespace {

TEST(AddedCudaMethodTest, ListsAndSelectorsAgreeOnWhatRunsOnGpus) {
  std::set<std::string> listed, claimed;
  for (const CudaSelectorMethod& method : CudaSelectorMethods()) listed.emplace(method.name);
  for (const SelectorMethod& method : SelectorMethods()) {
    if (MakeSelector(method.name).value()->SupportsGpu().runs) claimed.emplace(method.name);
  }
  EXPECT_EQ(listed, claimed);
  EXPECT_TRUE(listed.contains("newest"));
}

TEST(AddedCudaMethodTest, RefusesOptionsAndUnknownNames) {
  EXPECT_FALSE(MakeCudaSelector("newest", {{.name = "preset", .value = "3k"}}).ok());
  EXPECT_TRUE(absl::IsUnimplemented(MakeCudaSelector("oldest").status()));
}

TEST(AddedCudaMethodTest, SelectsWhatTheCpuSelects) {
  if (!HasGpu()) GTEST_SKIP() << "no GPU on this machine";
  AttentionBatch batch({.head_dim = 64}, 2, 4096, 7);
  std::vector<PolicyNumbers> numbers;
  const auto add = [&](int64_t slot, int64_t position, const PolicyNumbers& n) {
    batch.AddBlock(slot, position, 1);
    numbers.push_back(n);
  };
  batch.FillContext(0, 4096);
  batch.FillContext(1, 700);
  add(0, 4095, {.sink_tokens = 70, .window_tokens = 200, .budget_tokens = 600});
  add(1, 699, {.sink_tokens = 70, .window_tokens = 200, .budget_tokens = 600});  // all
  add(1, 650, {.sink_tokens = 0, .window_tokens = 1, .budget_tokens = 64});
  PageSelection expected = batch.MakeSelection(40);
  SerialExecutor executor;
  ASSERT_TRUE(MakeSelector("newest")
                  .value()
                  ->Select(batch.ParamsForSelect(numbers), expected, executor)
                  .ok());
  const auto method = MakeCudaSelector("newest").value();
  const SelectBounds bounds = {.group = 1, .capacity = 40, .budget_tokens = 600};
  const Lists found = RunSelectOnGpu(
      batch, numbers, HostLists(batch, 40).View(),
      method->WorkspaceBytes(bounds, batch.kv().View(), std::ssize(numbers)),
      [&](const CudaSelectParams& params, const PageSelection& out, std::byte* workspace) {
        return method->Select(params, bounds, out, workspace, nullptr);
      });
  for (int64_t row = 0; row < expected.num_rows; ++row) {
    SCOPED_TRACE(row);
    const auto r = static_cast<size_t>(row);
    ExpectSameHeader(found.headers[r], expected.header(row));
    EXPECT_EQ(TokensOf(found.headers[r], found.list(r), &SelectionEntry::live),
              TokensOf(expected.header(row), expected.list(row), &SelectionEntry::live));
  }
}

}  // namespace
}  // namespace kvasir::kernels
