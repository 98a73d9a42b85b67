// The GPU's append against the CPU's: every byte of pages, bounds and key codes.
#include "kernels/paged/append_cuda.h"

#include <bit>
#include <cmath>
#include <gtest/gtest.h>
#include <limits>
#include <random>
#include <tuple>
#include <vector>

#include "kernels/paged/count_selected_cuda.h"
#include "kernels/paged/digests_cuda.h"
#include "kernels/sparse/selection_accounting.h"
#include "tests/support/device_paged_kv.h"
#include "tests/support/fake_paged_kv.h"
#include "tests/support/test_tensor.h"

namespace kvasir::kernels {
namespace {

using tests::TestTensor;

constexpr int64_t kHeads = 3;
constexpr int64_t kSlots = 3;
constexpr int64_t kLayer = 1;

// head_dim, dtype of k and v, dtype of the KV.
class AppendCudaTest : public testing::TestWithParam<std::tuple<int64_t, DType, DType>> {
 protected:
  void SetUp() override {
    if (!HasGpu()) GTEST_SKIP() << "no GPU on this machine";
  }
  static int64_t HeadDim() { return std::get<0>(GetParam()); }
  static FakePagedKv MakeKv() {
    FakePagedKv kv({.num_layers = 2,
                    .num_kv_heads = kHeads,
                    .head_dim = HeadDim(),
                    .dtype = std::get<2>(GetParam())},
                   kSlots, /*max_blocks_per_slot=*/4);
    for (int64_t slot = 0; slot < kSlots; ++slot) kv.Grow(slot, 4 * kPageTokens);
    return kv;
  }
  // Normal values with equal elements, zeros of both signs, infinities and NaN among them.
  TestTensor Values(int64_t tokens) {
    TestTensor values(std::get<1>(GetParam()), {tokens, kHeads, HeadDim()});
    values.Fill(static_cast<uint32_t>(rng_()));
    constexpr float kInf = std::numeric_limits<float>::infinity();
    const float hostile[] = {0.0f, -0.0f, kInf,  -kInf, std::numeric_limits<float>::quiet_NaN(),
                             1.0f, 1e30f, 1e-30f};
    for (int64_t i = 0; i < values.size() / 16; ++i) {
      values.Set(static_cast<int64_t>(rng_() % static_cast<uint64_t>(values.size())),
                 hostile[rng_() % std::size(hostile)]);
    }
    for (int64_t i = 0; i < HeadDim(); ++i) {
      values.Set(i, i % 2 == 0 ? 0.0f : -0.0f);  // a key of zeros, the first one positive
      // Of zeros far from each other the first one counts.
      const float zero = i == HeadDim() / 4 ? 0.0f : -0.0f;
      const bool is_zero = i == HeadDim() / 4 || i == HeadDim() / 2;
      if (tokens > 1) values.Set((kHeads + 1) * HeadDim() + i, is_zero ? zero : 1.0f);
      if (tokens > 2) values.Set(2 * kHeads * HeadDim() + i, 2.5f);
    }
    return values;
  }
  // Appends on both sides.
  static void Append(TestTensor& k, TestTensor& v, const std::vector<QueryBlock>& blocks,
                     FakePagedKv& on_cpu, FakePagedKv& on_gpu, std::vector<uint8_t>& faults) {
    SerialExecutor executor;
    const absl::Status cpu = AppendKv(
        {.k = k.view(), .v = v.view(), .kv = on_cpu.View(), .layer = kLayer, .blocks = blocks},
        executor);
    ASSERT_TRUE(cpu.ok()) << cpu;
    AppendOnGpu(k, v, blocks, on_gpu, faults);
  }
  static void AppendOnGpu(TestTensor& k, TestTensor& v, const std::vector<QueryBlock>& blocks,
                          FakePagedKv& on_gpu, std::vector<uint8_t>& faults) {
    DeviceMemory memory;
    DevicePagedKv device(on_gpu.View());
    const auto kv = device.Copy();
    ASSERT_TRUE(kv.ok()) << kv.status();
    faults.assign(kSlots, 0);
    uint8_t* device_faults = memory.Copy(faults.data(), faults.size()).value();
    const QueryBlock* device_blocks = memory.Copy(blocks.data(), blocks.size()).value();
    const absl::Status gpu = AppendKv({.k = memory.Copy(k.view()).value(),
                                       .v = memory.Copy(v.view()).value(),
                                       .kv = *kv,
                                       .layer = kLayer,
                                       .blocks = {device_blocks, blocks.size()}},
                                      {device_faults, faults.size()}, nullptr);
    ASSERT_TRUE(gpu.ok()) << gpu;
    const absl::Status fetched = device.Fetch();
    ASSERT_TRUE(fetched.ok()) << fetched;
    ASSERT_TRUE(DeviceMemory::Fetch(device_faults, faults.data(), faults.size()).ok());
  }
  static std::vector<std::byte> Bytes(FakePagedKv& kv) {
    std::vector<std::byte> bytes;
    DevicePagedKv(kv.View()).ForEachPart([&](const std::byte* part, int64_t size) {
      if (part != nullptr) bytes.insert(bytes.end(), part, part + size);
    });
    return bytes;
  }

  std::mt19937_64 rng_{31};
};

INSTANTIATE_TEST_SUITE_P(Shapes, AppendCudaTest,
                         testing::Combine(testing::Values(8, 64, 80, 128, 256),
                                          testing::Values(DType::kFloat32, DType::kBFloat16),
                                          testing::Values(DType::kFloat32, DType::kBFloat16)));

TEST_P(AppendCudaTest, WritesTheBytesThatTheCpuWrites) {
  FakePagedKv on_cpu = MakeKv(), on_gpu = MakeKv();
  std::vector<uint8_t> faults;
  // A whole page and part of the next; rows of one sequence in one page, others between them, not
  // in the order of the batch's rows; then on from there, inside of pages.
  const std::vector<std::vector<QueryBlock>> steps = {
      {{.slot = 0, .first_row = 0, .num_rows = 64, .first_position = 64},
       {.slot = 0, .first_row = 64, .num_rows = 5, .first_position = 128}},
      {{.slot = 1, .first_row = 3, .num_rows = 1, .first_position = 62},
       {.slot = 2, .first_row = 0, .num_rows = 2, .first_position = 0},
       {.slot = 1, .first_row = 4, .num_rows = 1, .first_position = 63},
       {.slot = 2, .first_row = 6, .num_rows = 3, .first_position = 2},
       {.slot = 1, .first_row = 2, .num_rows = 1, .first_position = 64},
       {.slot = 1, .first_row = 5, .num_rows = 1, .first_position = 65},
       {.slot = 0, .first_row = 1, .num_rows = 1, .first_position = 133}},
      {{.slot = 2, .first_row = 0, .num_rows = 59, .first_position = 5}},
  };
  for (const std::vector<QueryBlock>& blocks : steps) {
    int64_t tokens = 1;  // one that goes nowhere
    for (const QueryBlock& block : blocks) tokens += block.num_rows;
    TestTensor k = Values(tokens), v = Values(tokens);
    Append(k, v, blocks, on_cpu, on_gpu, faults);
    EXPECT_EQ(faults, std::vector<uint8_t>(kSlots, 0));
    const std::vector<std::byte> expected = Bytes(on_cpu), found = Bytes(on_gpu);
    ASSERT_EQ(found.size(), expected.size());
    const auto differs = std::mismatch(found.begin(), found.end(), expected.begin());
    EXPECT_EQ(differs.first, found.end()) << "first at byte " << differs.first - found.begin();
  }
}

TEST_P(AppendCudaTest, WithoutDigestsItWritesThePagesOnly) {
  FakePagedKv on_gpu = MakeKv();
  TestTensor k = Values(2), v = Values(2);
  DeviceMemory memory;
  DevicePagedKv device(on_gpu.View());
  PagedKv kv = device.Copy().value();
  kv.bounds = nullptr;
  kv.key_codes = nullptr;
  std::vector<uint8_t> faults(kSlots);
  const QueryBlock block = {.slot = 1, .first_row = 1, .num_rows = 1, .first_position = 64};
  ASSERT_TRUE(AppendKv({.k = memory.Copy(k.view()).value(),
                        .v = memory.Copy(v.view()).value(),
                        .kv = kv,
                        .layer = kLayer,
                        .blocks = {memory.Copy(&block, 1).value(), 1}},
                       {memory.Copy(faults.data(), faults.size()).value(), faults.size()}, nullptr)
                  .ok());
  ASSERT_TRUE(device.Fetch().ok());
  const std::byte* value = on_gpu.Token(FakePagedKv::Side::kValue, 1, 64, kLayer, 2);
  const float expected = v.Get((kHeads + 2) * HeadDim());
  const bool narrow = std::get<2>(GetParam()) == DType::kBFloat16;
  EXPECT_EQ(on_gpu.Get(value, 0), narrow ? static_cast<float>(BFloat16(expected)) : expected);
  EXPECT_TRUE(std::isnan(on_gpu.Get(on_gpu.View().Bounds(1, 1, kLayer, 2), 0)));
}

TEST_P(AppendCudaTest, PagesOutsideTheDeviceTierSetTheFaultOfTheirSlotOnly) {
  for (const PageTier tier : {PageTier::kHost, PageTier::kAbsent}) {
    FakePagedKv on_gpu = MakeKv();
    on_gpu.SetTier(1, 1, kLayer, 2, tier);
    TestTensor k = Values(2), v = Values(2);
    std::vector<uint8_t> faults;
    AppendOnGpu(k, v,
                {{.slot = 1, .first_row = 0, .num_rows = 1, .first_position = 64},
                 {.slot = 2, .first_row = 1, .num_rows = 1, .first_position = 64}},
                on_gpu, faults);
    EXPECT_EQ(faults, (std::vector<uint8_t>{0, 1, 0}));
    EXPECT_TRUE(std::isnan(
        on_gpu.Get(on_gpu.Token(FakePagedKv::Side::kKey, 1, 64, kLayer, 2), HeadDim() - 1)));
  }
}

TEST_P(AppendCudaTest, NothingToAppendAndHostMemory) {
  FakePagedKv on_gpu = MakeKv();
  TestTensor k = Values(1), v = Values(1);
  std::vector<uint8_t> faults;
  AppendOnGpu(k, v, {}, on_gpu, faults);
  faults.resize(kSlots);
  EXPECT_EQ(
      AppendKv({.k = k.view(), .v = v.view(), .kv = on_gpu.View(), .layer = kLayer, .blocks = {}},
               faults, nullptr)
          .code(),
      absl::StatusCode::kInvalidArgument);
}

TEST_P(AppendCudaTest, RebuildsTheBoundsThatTheCpuRebuilds) {
  FakePagedKv on_cpu = MakeKv(), on_gpu = MakeKv();
  std::vector<uint8_t> faults;
  const std::vector<QueryBlock> blocks = {
      {.slot = 0, .first_row = 0, .num_rows = 64, .first_position = 0},
      {.slot = 2, .first_row = 64, .num_rows = 40, .first_position = 64}};
  TestTensor k = Values(104), v = Values(104);
  Append(k, v, blocks, on_cpu, on_gpu, faults);
  const std::vector<BlockKeys> cut = {{.slot = 0, .block = 0, .num_tokens = 17},
                                      {.slot = 2, .block = 1, .num_tokens = 0}};
  for (const BlockKeys& keys : cut) {
    ASSERT_TRUE(RebuildBounds(on_cpu.View(), keys.slot, keys.block, keys.num_tokens).ok());
  }
  DeviceMemory memory;
  DevicePagedKv device(on_gpu.View());
  const auto kv = device.Copy();
  ASSERT_TRUE(kv.ok()) << kv.status();
  uint8_t* device_faults = memory.Copy(faults.data(), faults.size()).value();
  const BlockKeys* device_cut = memory.Copy(cut.data(), cut.size()).value();
  const absl::Status status =
      RebuildBounds(*kv, {device_cut, cut.size()}, {device_faults, faults.size()}, nullptr);
  ASSERT_TRUE(status.ok()) << status;
  ASSERT_TRUE(device.Fetch().ok());
  EXPECT_EQ(Bytes(on_cpu), Bytes(on_gpu));
}

// What lists hold besides, in sink and window, counts there.
TEST(CountSelectedCudaTest, CountsWhatAWalkCounts) {
  if (!HasGpu()) GTEST_SKIP() << "no GPU on this machine";
  constexpr int64_t kRows = 40, kCapacity = 40;
  std::mt19937_64 rng(7);
  std::vector<QueryBlock> blocks(kRows / 2);  // of two KV heads
  std::vector<SelectionHeader> headers(kRows);
  std::vector<SelectionEntry> entries(kRows * kCapacity);
  std::vector<SelectedCounts> expected(kRows), found(kRows);
  for (size_t row = 0; row < kRows; ++row) {
    QueryBlock& block = blocks[row / 2];
    if (row % 2 == 0) block = {.num_rows = 1, .first_position = static_cast<int64_t>(rng() % 2400)};
    SelectionHeader& header = headers[row];
    header.kind = row % 5 == 0 ? SelectionHeader::Kind::kAll : SelectionHeader::Kind::kList;
    header.window_begin =
        static_cast<int64_t>(rng() % static_cast<uint64_t>(block.first_position + 1));
    header.sink_end = static_cast<int64_t>(rng() % static_cast<uint64_t>(header.window_begin + 1));
    SelectionEntry* const list = &entries[row * kCapacity];
    for (int64_t page = header.sink_end / kPageTokens; page * kPageTokens < header.window_begin;
         page += 1 + static_cast<int64_t>(rng() % 3)) {
      const int64_t start = page * kPageTokens;
      list[header.count++] = {
          .page = page,
          .live = rng() % 4 == 0
                      ? 0
                      : rng() & TokenMask(header.sink_end - start, header.window_begin - start)};
    }
    expected[row].pruned_pages = static_cast<int32_t>(CountPrunedPages(header, list));
    for (SelectedPages walk(header, list, block.first_position); walk.valid(); walk.Next()) {
      ++expected[row].pages;
      expected[row].tokens += std::popcount(walk.mask());
    }
  }
  DeviceMemory memory;
  const PageSelection selection = {.headers = memory.Copy(headers.data(), headers.size()).value(),
                                   .entries = memory.Copy(entries.data(), entries.size()).value(),
                                   .num_rows = kRows,
                                   .capacity = kCapacity};
  const QueryBlock* device_blocks = memory.Copy(blocks.data(), blocks.size()).value();
  SelectedCounts* counts = memory.Copy(found.data(), found.size()).value();
  const absl::Status status =
      CountSelected({device_blocks, blocks.size()}, selection, {counts, found.size()}, nullptr);
  ASSERT_TRUE(status.ok()) << status;
  ASSERT_TRUE(DeviceMemory::Fetch(counts, found.data(), kRows * sizeof(SelectedCounts)).ok());
  for (size_t row = 0; row < kRows; ++row) {
    EXPECT_EQ(found[row].pages, expected[row].pages) << row;
    EXPECT_EQ(found[row].tokens, expected[row].tokens) << row;
    EXPECT_EQ(found[row].pruned_pages, expected[row].pruned_pages) << row;
  }
}

}  // namespace
}  // namespace kvasir::kernels
