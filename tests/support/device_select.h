// Selectors and pruners on the GPU over a host's batch: everything is copied there, and the lists
// come back.
#pragma once

#include <functional>
#include <gtest/gtest.h>
#include <tuple>
#include <vector>

#include "kernels/sparse/common/cuda_selector.h"
#include "tests/support/attention_batch.h"
#include "tests/support/device_memory.h"
#include "tests/support/device_paged_kv.h"

namespace kvasir::kernels {

// What the GPU selected, on the host.
struct Lists {
  std::vector<SelectionHeader> headers;
  std::vector<SelectionEntry> entries;
  std::vector<uint8_t> faults;
  int64_t capacity = 0;
  const SelectionEntry* list(size_t row) const {
    return entries.data() + row * static_cast<size_t>(capacity);
  }
};

// Headers and lists of the host, copied: a batch lends its own until it changes.
struct HostLists {
  std::vector<SelectionHeader> headers;
  std::vector<SelectionEntry> entries;
  int64_t capacity = 0;

  // Nothing selected yet.
  HostLists(const AttentionBatch& batch, int64_t room)
      : headers(batch.blocks().size() * static_cast<size_t>(batch.shape().kv_heads)),
        entries(headers.size() * static_cast<size_t>(room)),
        capacity(room) {}
  explicit HostLists(const PageSelection& from)
      : headers(from.headers, from.headers + from.num_rows),
        entries(from.entries, from.entries + from.num_rows * from.capacity),
        capacity(from.capacity) {}
  PageSelection View() {
    return {.headers = headers.data(),
            .entries = entries.data(),
            .num_rows = std::ssize(headers),
            .capacity = capacity};
  }
};

using DeviceSelect = std::function<absl::Status(const CudaSelectParams& params,
                                                const PageSelection& out, std::byte* workspace)>;

// `selection` is the host's: what the device's begins as, and its capacity. `rotation`: likewise.
inline Lists RunSelectOnGpu(AttentionBatch& batch, const std::vector<PolicyNumbers>& numbers,
                            const PageSelection& selection, int64_t workspace_bytes,
                            const DeviceSelect& select, const QueryRotation& rotation = {}) {
  SelectParams host = batch.ParamsForSelect(numbers);
  host.rotation = rotation;
  DeviceMemory memory;
  DevicePagedKv kv(host.kv);
  CudaSelectParams device = {host};
  device.q = memory.Copy(host.q).value();
  device.kv = kv.Copy().value();
  device.tiles = {memory.Copy(host.tiles.data(), host.tiles.size()).value(), host.tiles.size()};
  device.numbers = {memory.Copy(numbers.data(), numbers.size()).value(), numbers.size()};
  device.faults = {memory.Copy(host.faults.data(), host.faults.size()).value(), host.faults.size()};
  device.device_rope = memory.Copy(host.rope).value();
  if (host.rotation.cos != nullptr) {
    const auto angles = static_cast<size_t>(host.q.dim(0) * host.q.dim(2) / 2);
    device.rotation = {.cos = memory.Copy(host.rotation.cos, angles).value(),
                       .sin = memory.Copy(host.rotation.sin, angles).value()};
  }
  const auto rows = static_cast<size_t>(selection.num_rows);
  const size_t num_entries = rows * static_cast<size_t>(selection.capacity);
  Lists lists = {.headers = {selection.headers, selection.headers + rows},
                 .entries = {selection.entries, selection.entries + num_entries},
                 .faults = std::vector<uint8_t>(host.faults.size()),
                 .capacity = selection.capacity};
  const PageSelection out = {
      .headers = memory.Copy(lists.headers.data(), lists.headers.size()).value(),
      .entries = memory.Copy(lists.entries.data(), lists.entries.size()).value(),
      .num_rows = selection.num_rows,
      .capacity = selection.capacity};
  const DeviceBuffer workspace = DeviceBuffer::Allocate(workspace_bytes).value();
  const absl::Status status = select(device, out, workspace.data());
  EXPECT_TRUE(status.ok()) << status;
  const auto fetch = [](auto* from, auto& to) {
    const absl::Status fetched =
        DeviceMemory::Fetch(from, to.data(), to.size() * sizeof(to.front()));
    EXPECT_TRUE(fetched.ok()) << fetched;
  };
  fetch(out.headers, lists.headers);
  fetch(out.entries, lists.entries);
  fetch(device.faults.data(), lists.faults);
  return lists;
}

inline void ExpectSameHeader(const SelectionHeader& found, const SelectionHeader& expected) {
  EXPECT_EQ(found.kind, expected.kind);
  EXPECT_EQ(found.count, expected.count);
  EXPECT_EQ(found.sink_end, expected.sink_end);
  EXPECT_EQ(found.window_begin, expected.window_begin);
  EXPECT_EQ(found.query_position, expected.query_position);
  EXPECT_EQ(found.made_at, expected.made_at);
}

// The tokens of a list, ascending. Entries must be ascending, unique and hold something.
inline std::vector<int64_t> TokensOf(const SelectionHeader& header, const SelectionEntry* list,
                                     uint64_t SelectionEntry::*mask) {
  std::vector<int64_t> tokens;
  for (int32_t i = 0; i < header.count; ++i) {
    EXPECT_TRUE(i == 0 || list[i - 1].page < list[i].page) << "ascending";
    EXPECT_NE(list[i].chosen, 0u) << "entry " << i;
    for (uint64_t rest = list[i].*mask; rest != 0; rest &= rest - 1) {
      tokens.push_back(list[i].page * kPageTokens + std::countr_zero(rest));
    }
  }
  return tokens;
}

// head_dim, query heads of a KV head, dtype of q, dtype of the KV.
class SelectorCudaTest : public testing::TestWithParam<std::tuple<int64_t, int64_t, DType, DType>> {
 protected:
  void SetUp() override {
    if (!HasGpu()) GTEST_SKIP() << "no GPU on this machine";
  }
  static AttentionShape Shape() {
    return {.activation = std::get<2>(GetParam()),
            .kv = std::get<3>(GetParam()),
            .head_dim = std::get<0>(GetParam()),
            .kv_heads = 2,
            .group = std::get<1>(GetParam())};
  }
};

}  // namespace kvasir::kernels
