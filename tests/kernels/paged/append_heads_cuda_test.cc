// The GPU's AppendHeads against the CPU's: every byte of queries, pages, bounds and key codes.
#include "kernels/append/append_heads_cuda.h"

#include <bit>
#include <cmath>
#include <gtest/gtest.h>
#include <limits>
#include <random>
#include <tuple>
#include <vector>

#include "kernels/append/digests_cuda.h"
#include "kernels/paged/count_selected_cuda.h"
#include "kernels/sparse/common/selection_accounting.h"
#include "tests/support/case_name.h"
#include "tests/support/compare.h"
#include "tests/support/device_paged_kv.h"
#include "tests/support/fake_paged_kv.h"
#include "tests/support/late_bytes.h"
#include "tests/support/test_tensor.h"
#include "tests/support/walked_counts.h"

namespace kvasir::kernels {
namespace {

using tests::AllClose;
using tests::TestTensor;

constexpr int64_t kHeads = 3;
constexpr int64_t kQueryHeads = 5;
constexpr int64_t kAllHeads = kQueryHeads + 2 * kHeads;
constexpr int64_t kSlots = 3;
constexpr int64_t kLayer = 1;

// head_dim, dtype of heads, dtype of the KV.
class AppendHeadsCudaTest : public testing::TestWithParam<std::tuple<int64_t, DType, DType>> {
 protected:
  void SetUp() override {
    if (!HasGpu()) GTEST_SKIP() << "no GPU on this machine";
  }
  static int64_t HeadDim() { return std::get<0>(GetParam()); }
  static FakePagedKv MakeKv() {
    FakePagedKv kv(
        {.num_layers = 2, .num_kv_heads = kHeads, .head_dim = HeadDim(), .dtype = KvDType()},
        kSlots, /*max_blocks_per_slot=*/4);
    for (int64_t slot = 0; slot < kSlots; ++slot) kv.Grow(slot, 4 * kPageTokens);
    return kv;
  }
  static DType Dtype() { return std::get<1>(GetParam()); }
  static DType KvDType() { return std::get<2>(GetParam()); }
  static float Largest(const std::vector<float>& elements) {
    float largest = 0;
    for (const float x : elements) largest = std::max(largest, std::abs(x));
    return largest;
  }
  // Normal values, and among them equal elements, zeros of both signs, infinities and NaN.
  TestTensor Values(int64_t tokens) {
    const int64_t d = HeadDim();
    TestTensor values(Dtype(), {tokens, kAllHeads * d});
    values.Fill(static_cast<uint32_t>(rng_()));
    constexpr float kInf = std::numeric_limits<float>::infinity();
    const float hostile[] = {0.0f, -0.0f, kInf,  -kInf, std::numeric_limits<float>::quiet_NaN(),
                             1.0f, 1e30f, 1e-30f};
    for (int64_t i = 0; i < values.size() / 16; ++i) {
      values.Set(static_cast<int64_t>(rng_() % static_cast<uint64_t>(values.size())),
                 hostile[rng_() % std::size(hostile)]);
    }
    const auto key = [&](int64_t token, int64_t head) {
      return (token * kAllHeads + kQueryHeads + head) * d;
    };
    for (int64_t i = 0; i < d; ++i) {
      values.Set(key(0, 0) + i, i % 2 == 0 ? 0.0f : -0.0f);  // zeros, the first one positive
      // Among zeros far from each other the first one counts.
      const float zero = i == d / 4 ? 0.0f : -0.0f;
      const bool is_zero = i == d / 4 || i == d / 2;
      if (tokens > 1) values.Set(key(1, 1) + i, is_zero ? zero : 1.0f);
      if (tokens > 2) values.Set(key(2, 0) + i, 2.5f);
    }
    return values;
  }
  // Weights of norms; empty when heads are not normalized.
  struct Norms {
    TestTensor q{Dtype(), {HeadDim()}}, k{Dtype(), {HeadDim()}};
  };
  struct Given {
    TestTensor& qkv;
    const std::vector<QueryTile>& tiles;
    const RopeTable* rope = nullptr;
    Norms* norms = nullptr;
  };
  static LayerHeads Heads(const Given& given) {
    LayerHeads heads;
    heads.layer = kLayer;
    heads.qkv = given.qkv.view();
    heads.epsilon = 1e-5f;
    if (given.norms != nullptr) {
      heads.q_norm = given.norms->q.view();
      heads.k_norm = given.norms->k.view();
    }
    return heads;
  }
  static TestTensor OnCpu(const Given& given, FakePagedKv& kv) {
    SerialExecutor executor;
    const int64_t tokens = given.qkv.shape()[0];
    TestTensor q(Dtype(), {tokens, kQueryHeads, HeadDim()});
    TestTensor k(Dtype(), {tokens, kHeads, HeadDim()}), v(Dtype(), {tokens, kHeads, HeadDim()});
    LayerHeads heads = Heads(given);
    heads.q = q.view();
    heads.k = k.view();
    heads.v = v.view();
    const absl::Status status =
        AppendHeads({.heads = heads, .kv = kv.View(), .tiles = given.tiles}, given.rope, executor);
    EXPECT_TRUE(status.ok()) << status;
    return q;
  }
  static TestTensor OnGpu(const Given& given, FakePagedKv& kv, std::vector<uint8_t>& faults) {
    DeviceMemory memory;
    DevicePagedKv device(kv.View());
    const auto device_kv = device.Copy();
    EXPECT_TRUE(device_kv.ok()) << device_kv.status();
    faults.assign(kSlots, 0);
    uint8_t* device_faults = memory.Copy(faults.data(), faults.size()).value();
    const QueryTile* device_tiles = memory.Copy(given.tiles.data(), given.tiles.size()).value();
    const int64_t tokens = given.qkv.shape()[0];
    TestTensor q(Dtype(), {tokens, kQueryHeads, HeadDim()});
    LayerHeads heads = Heads(given);
    heads.qkv = memory.Copy(heads.qkv).value();
    heads.q = memory.Copy(q.view()).value();
    if (given.norms != nullptr) {
      heads.q_norm = memory.Copy(heads.q_norm).value();
      heads.k_norm = memory.Copy(heads.k_norm).value();
    }
    RopeAngles angles;
    if (given.rope != nullptr) {
      const auto copy = [&](const float* from) {
        const auto count = static_cast<size_t>(tokens * given.rope->half_dim());
        return TensorView(memory.Copy(const_cast<float*>(from), count).value(), DType::kFloat32,
                          {tokens, given.rope->half_dim()}, Device::kCuda);
      };
      angles = {.cos = copy(given.rope->cos()), .sin = copy(given.rope->sin())};
    }
    // The previous kernel writes the product.
    LateBytes late;
    EXPECT_TRUE(late.Hold(heads.qkv.data(), static_cast<size_t>(heads.qkv.size_bytes())).ok());
    EXPECT_TRUE(late.PutBack(/*stream=*/nullptr).ok());
    const absl::Status status = AppendHeads(
        {.heads = heads, .kv = *device_kv, .tiles = {device_tiles, given.tiles.size()}},
        given.rope == nullptr ? nullptr : &angles, {device_faults, faults.size()}, nullptr);
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_TRUE(device.Fetch().ok());
    EXPECT_TRUE(DeviceMemory::Fetch(device_faults, faults.data(), faults.size()).ok());
    EXPECT_TRUE(DeviceMemory::Fetch(heads.q, q.view()).ok());
    return q;
  }
  static void ExpectSameBits(TestTensor& found, TestTensor& expected) {
    for (int64_t i = 0; i < found.size(); ++i) {
      if (std::isnan(expected.Get(i))) {
        EXPECT_TRUE(std::isnan(found.Get(i))) << i;
      } else {
        EXPECT_EQ(std::bit_cast<uint32_t>(found.Get(i)), std::bit_cast<uint32_t>(expected.Get(i)))
            << i;
      }
    }
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

INSTANTIATE_TEST_SUITE_P(Shapes, AppendHeadsCudaTest,
                         testing::Combine(testing::Values(8, 64, 80, 128, 256),
                                          testing::Values(DType::kFloat32, DType::kBFloat16),
                                          testing::Values(DType::kFloat32, DType::kBFloat16)),
                         CaseName());
INSTANTIATE_TEST_SUITE_P(Codes, AppendHeadsCudaTest,
                         testing::Combine(testing::Values(8, 64, 80, 128, 256),
                                          testing::Values(DType::kFloat32, DType::kBFloat16),
                                          testing::Values(DType::kFloat8E4M3, DType::kInt8)),
                         CaseName());

// A whole page and part of the next; rows of one sequence in one page, with others between them,
// not in the order of the batch's rows; then a continuation inside pages.
const std::vector<QueryTile> kSteps[] = {
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

int64_t TokensOf(const std::vector<QueryTile>& tiles) {
  int64_t tokens = 1;  // one token that goes nowhere
  for (const QueryTile& tile : tiles) tokens += tile.num_rows;
  return tokens;
}

TEST_P(AppendHeadsCudaTest, WritesTheBytesThatTheCpuWrites) {
  for (const bool rotated : {false, true}) {
    SCOPED_TRACE(rotated);
    FakePagedKv on_cpu = MakeKv(), on_gpu = MakeKv();
    std::vector<double> frequencies(static_cast<size_t>(HeadDim() / 2));
    for (size_t i = 0; i < frequencies.size(); ++i) frequencies[i] = std::pow(0.7, i);
    RopeTable rope(frequencies, 1.25);
    std::vector<uint8_t> faults;
    for (const std::vector<QueryTile>& tiles : kSteps) {
      const int64_t tokens = TokensOf(tiles);
      TestTensor qkv = Values(tokens);
      // Arithmetic may give another NaN than a copy.
      for (int64_t i = 0; rotated && i < qkv.size(); ++i) {
        if (!std::isfinite(qkv.Get(i))) qkv.Set(i, 3.0f);
      }
      std::vector<int64_t> positions(static_cast<size_t>(tokens));
      for (int64_t& position : positions) position = static_cast<int64_t>(rng_() % 100'000);
      SerialExecutor executor;
      rope.SetPositions(positions, executor);
      const Given given = {.qkv = qkv, .tiles = tiles, .rope = rotated ? &rope : nullptr};
      TestTensor expected_q = OnCpu(given, on_cpu), q = OnGpu(given, on_gpu, faults);
      ExpectSameBits(q, expected_q);
      EXPECT_EQ(faults, std::vector<uint8_t>(kSlots, 0));
      const std::vector<std::byte> expected = Bytes(on_cpu), found = Bytes(on_gpu);
      ASSERT_EQ(found.size(), expected.size());
      const auto differs = std::mismatch(found.begin(), found.end(), expected.begin());
      EXPECT_EQ(differs.first, found.end()) << "first at byte " << differs.first - found.begin();
    }
  }
}

// Squares are summed in another order than on the CPU.
TEST_P(AppendHeadsCudaTest, NormalizesHeadsAlmostAsTheCpuDoes) {
  FakePagedKv on_cpu = MakeKv(), on_gpu = MakeKv();
  Norms norms;
  norms.q.Fill(1);
  norms.k.Fill(2);
  for (const std::vector<QueryTile>& tiles : kSteps) {
    TestTensor qkv(Dtype(), {TokensOf(tiles), kAllHeads * HeadDim()});
    qkv.Fill(static_cast<uint32_t>(rng_()));
    const Given given = {.qkv = qkv, .tiles = tiles, .norms = &norms};
    std::vector<uint8_t> faults;
    TestTensor expected = OnCpu(given, on_cpu), found = OnGpu(given, on_gpu, faults);
    const bool narrow = Dtype() == DType::kBFloat16;
    EXPECT_TRUE(AllClose(found.Values(), expected.Values(),
                         {.absolute = 0, .relative = narrow ? 1.0 / 64 : 1e-5}, expected.shape()));
    // A code may be the next one.
    const float relative = IsQuantized(KvDType())                    ? 1.0f / 7
                           : narrow || KvDType() == DType::kBFloat16 ? 1.0f / 64
                                                                     : 1e-5f;
    for (const QueryTile& tile : tiles) {
      for (int64_t head = 0; head < kHeads; ++head) {
        const auto key_of = [&](FakePagedKv& kv) {
          return kv.Elements(FakePagedKv::Side::kKey, tile.slot,
                             tile.first_position + tile.num_rows - 1, kLayer, head);
        };
        const std::vector<float> keys = key_of(on_cpu), found_keys = key_of(on_gpu);
        const float least = IsQuantized(KvDType()) ? Largest(keys) / 60 : 0;
        for (size_t i = 0; i < keys.size(); ++i) {
          EXPECT_NEAR(found_keys[i], keys[i], std::abs(keys[i]) * relative + least);
        }
      }
    }
  }
}

TEST_P(AppendHeadsCudaTest, WithoutDigestsItWritesThePagesOnly) {
  FakePagedKv on_gpu = MakeKv();
  TestTensor qkv = Values(2), q(Dtype(), {2, kQueryHeads, HeadDim()});
  DeviceMemory memory;
  DevicePagedKv device(on_gpu.View());
  PagedKv kv = device.Copy().value();
  kv.bounds = nullptr;
  kv.key_codes = nullptr;
  std::vector<uint8_t> faults(kSlots);
  const QueryTile tile = {.slot = 1, .first_row = 1, .num_rows = 1, .first_position = 64};
  ASSERT_TRUE(AppendHeads({.heads = {.layer = kLayer,
                                     .qkv = memory.Copy(qkv.view()).value(),
                                     .q = memory.Copy(q.view()).value(),
                                     .k = {},
                                     .v = {}},
                           .kv = kv,
                           .tiles = {memory.Copy(&tile, 1).value(), 1}},
                          nullptr,
                          {memory.Copy(faults.data(), faults.size()).value(), faults.size()},
                          nullptr)
                  .ok());
  ASSERT_TRUE(device.Fetch().ok());
  std::vector<float> value(static_cast<size_t>(HeadDim()));
  for (size_t i = 0; i < value.size(); ++i) {
    value[i] =
        qkv.Get((kAllHeads + kQueryHeads + kHeads + 2) * HeadDim() + static_cast<int64_t>(i));
  }
  FakePagedKv expected = MakeKv();
  expected.SetToken(FakePagedKv::Side::kValue, 1, 64, kLayer, 2, value);
  const auto bits_of = [](FakePagedKv& from) {
    const auto elements = from.Elements(FakePagedKv::Side::kValue, 1, 64, kLayer, 2);
    return std::bit_cast<uint32_t>(elements[0]);
  };
  EXPECT_EQ(bits_of(on_gpu), bits_of(expected));
  EXPECT_TRUE(std::isnan(on_gpu.Get(on_gpu.View().Bounds(1, 1, kLayer, 2), 0)));
}

TEST_P(AppendHeadsCudaTest, PagesOutsideTheDeviceTierSetTheFaultOfTheirSlotOnly) {
  for (const PageTier tier : {PageTier::kHost, PageTier::kAbsent}) {
    FakePagedKv on_gpu = MakeKv();
    on_gpu.SetTier(1, 1, kLayer, 2, tier);
    TestTensor qkv = Values(2);
    std::vector<uint8_t> faults;
    OnGpu({.qkv = qkv,
           .tiles = {{.slot = 1, .first_row = 0, .num_rows = 1, .first_position = 64},
                     {.slot = 2, .first_row = 1, .num_rows = 1, .first_position = 64}}},
          on_gpu, faults);
    EXPECT_EQ(faults, (std::vector<uint8_t>{0, 1, 0}));
    EXPECT_TRUE(std::isnan(on_gpu.Elements(FakePagedKv::Side::kKey, 1, 64, kLayer, 2).back()));
  }
}

TEST_P(AppendHeadsCudaTest, NothingToAppendAndHostMemory) {
  FakePagedKv on_gpu = MakeKv();
  TestTensor qkv = Values(1), q(Dtype(), {1, kQueryHeads, HeadDim()});
  std::vector<uint8_t> faults;
  OnGpu({.qkv = qkv, .tiles = {}}, on_gpu, faults);
  EXPECT_EQ(
      AppendHeads({.heads = {.layer = kLayer, .qkv = qkv.view(), .q = q.view(), .k = {}, .v = {}},
                   .kv = on_gpu.View(),
                   .tiles = {}},
                  nullptr, faults, nullptr)
          .code(),
      absl::StatusCode::kInvalidArgument);
}

TEST_P(AppendHeadsCudaTest, RebuildsTheBoundsThatTheCpuRebuilds) {
  FakePagedKv on_cpu = MakeKv(), on_gpu = MakeKv();
  std::vector<uint8_t> faults;
  const std::vector<QueryTile> tiles = {
      {.slot = 0, .first_row = 0, .num_rows = 64, .first_position = 0},
      {.slot = 2, .first_row = 64, .num_rows = 40, .first_position = 64}};
  TestTensor qkv = Values(104);
  OnCpu({.qkv = qkv, .tiles = tiles}, on_cpu);
  OnGpu({.qkv = qkv, .tiles = tiles}, on_gpu, faults);
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

// Listed tokens that lie in sink or window are counted there.
TEST(CountSelectedCudaTest, CountsWhatAWalkCounts) {
  if (!HasGpu()) GTEST_SKIP() << "no GPU on this machine";
  constexpr int64_t kRows = 40, kCapacity = 40;
  std::mt19937_64 rng(7);
  std::vector<QueryTile> tiles(kRows / 2);  // for two KV heads
  std::vector<SelectionHeader> headers(kRows);
  std::vector<SelectionEntry> entries(kRows * kCapacity);
  std::vector<SelectedCounts> expected(kRows), found(kRows);
  for (size_t row = 0; row < kRows; ++row) {
    QueryTile& tile = tiles[row / 2];
    if (row % 2 == 0) tile = {.num_rows = 1, .first_position = static_cast<int64_t>(rng() % 2400)};
    SelectionHeader& header = headers[row];
    header.kind = row % 5 == 0 ? SelectionHeader::Kind::kAll : SelectionHeader::Kind::kList;
    header.window_begin =
        static_cast<int64_t>(rng() % static_cast<uint64_t>(tile.first_position + 1));
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
    header.reused_stages = static_cast<int32_t>(row % 3);
    expected[row] = tests::WalkedCounts(header, list, tile.first_position);
  }
  DeviceMemory memory;
  const PageSelection selection = {.headers = memory.Copy(headers.data(), headers.size()).value(),
                                   .entries = memory.Copy(entries.data(), entries.size()).value(),
                                   .num_rows = kRows,
                                   .capacity = kCapacity};
  const QueryTile* device_tiles = memory.Copy(tiles.data(), tiles.size()).value();
  SelectedCounts* counts = memory.Copy(found.data(), found.size()).value();
  const absl::Status status =
      CountSelected({device_tiles, tiles.size()}, selection, {counts, found.size()}, nullptr);
  ASSERT_TRUE(status.ok()) << status;
  ASSERT_TRUE(DeviceMemory::Fetch(counts, found.data(), kRows * sizeof(SelectedCounts)).ok());
  for (size_t row = 0; row < kRows; ++row) {
    EXPECT_TRUE(tests::AreSame(found[row], expected[row])) << row;
  }
}

}  // namespace
}  // namespace kvasir::kernels
