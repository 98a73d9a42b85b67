// Decode and prefill of attend_cuda.h as the tests run them, compared with the reference on the
// CPU. Skips without a GPU.
#pragma once

#include <cstdint>
#include <gtest/gtest.h>
#include <limits>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/attention/attend_cpu.h"
#include "kernels/attention/attend_cuda.h"
#include "tests/support/attention_batch.h"
#include "tests/support/compare.h"
#include "tests/support/device_attention_batch.h"

namespace kvasir::kernels {

inline constexpr uint64_t kWholePage = ~uint64_t{0};

// head_dim, query heads of a KV head, dtype of the KV.
class AttendCudaTest : public testing::TestWithParam<std::tuple<int64_t, int64_t, DType>> {
 protected:
  void SetUp() override {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
      GTEST_SKIP() << "no GPU on this machine";
    }
  }
  AttentionShape Shape() const {
    return {.activation = DType::kBFloat16,
            .kv = std::get<2>(GetParam()),
            .head_dim = std::get<0>(GetParam()),
            .kv_heads = 2,
            .group = std::get<1>(GetParam())};
  }
  // How often decode reads a token, for 8 heads of its group at a time.
  int64_t TimesRead() const { return (Shape().group + 7) / 8; }
};

// Makes a key or value of the layer under test NaN.
inline void Poison(AttentionBatch& batch, FakePagedKv::Side side, int64_t position, int64_t head) {
  std::vector<float> token(static_cast<size_t>(batch.shape().head_dim), 1.0f);
  token[5] = std::numeric_limits<float>::quiet_NaN();
  batch.kv().SetToken(side, 0, position, AttentionBatch::kLayer, head, token);
}

inline absl::Status Decode(const CudaAttendParams& params, const KvTensorMaps& maps) {
  const int64_t group = params.q.dim(1) / params.kv.layout.num_kv_heads;
  KVASIR_ASSIGN_OR_RETURN(const DeviceBuffer workspace,
                          DeviceBuffer::Allocate(AttendDecodeWorkspaceBytes(
                              params.kv.layout, std::ssize(params.tiles), group)));
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

inline absl::Status Prefill(const CudaAttendParams& params, const KvTensorMaps& maps) {
  return AttendPrefill(params, maps, nullptr);
}

inline std::vector<float> Outputs(const AttentionBatch& batch) {
  const float* first = batch.out(0, 0);
  return {first, first + batch.num_tokens() * batch.heads() * batch.shape().head_dim};
}

// Runs the reference and the device over the same batch, and compares out and lse.
inline void ExpectMatchesReference(AttentionBatch& batch,
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
  const double error = batch.grouped().on() ? 1.5e-2 : 1e-2;
  EXPECT_TRUE(
      tests::AllClose(Outputs(batch), expected, {.absolute = error, .relative = 1e-2}, shape));
  // Rotated values are rounded, too: to a neighbour where angles differ in the last bit. With
  // grouped positions decode rotates near keys and their query to other positions at the same
  // distance.
  const double lse_error = batch.rope() == nullptr ? 1e-4 : batch.grouped().on() ? 1e-2 : 1e-3;
  EXPECT_TRUE(tests::AllClose(lse, expected_lse, {.absolute = lse_error, .relative = 1e-5},
                              {batch.num_tokens(), batch.heads()}));
}

// A list with pruned tokens that reaches into sink and window.
inline RowSelection RandomList(std::mt19937_64& rng, int64_t position) {
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
inline void AddTokensWithLists(AttentionBatch& batch) {
  for (int64_t slot = 0; slot < 3; ++slot) {
    batch.FillContext(slot, 3000);
    const int64_t position = 2999 - slot * 31;
    batch.AddBlock(slot, position, 1, [&](int64_t) { return RandomList(batch.rng(), position); });
  }
}

}  // namespace kvasir::kernels
