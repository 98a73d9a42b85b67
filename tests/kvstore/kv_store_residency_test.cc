// The residency protocol against a naive model: random plans, and every byte that a kernel can
// reach must be what was written, whatever tier it lies in (KVASIR_TEST_SCALE=100 for 1e7 plans).
#include <cstring>
#include <gtest/gtest.h>
#include <iterator>
#include <map>
#include <optional>
#include <random>
#include <utility>

#include "kvstore/kv_store.h"
#include "tests/support/iterations.h"

namespace kvasir::kvstore {
namespace {

using kernels::KvLayout;
using kernels::PagedKv;
using kernels::PageTier;

constexpr KvLayout kLayout = {
    .num_layers = 2, .num_kv_heads = 2, .head_dim = 2, .dtype = kernels::DType::kBFloat16};
constexpr int64_t kSlots = 3;
constexpr int64_t kBlocksPerSlot = 6;

// What token row `row` (K rows, then V rows) of a page of the block holds.
uint32_t Pattern(int64_t id, int64_t layer, int64_t head, int64_t row) {
  return static_cast<uint32_t>(id * 2654435761 + layer * 65537 + head * 257 + row * 3 + 1);
}

struct ModelBlock {
  int64_t handles = 0;  // of the test and of slots
  int64_t rows = 0;     // tokens written
  bool sealed = false;
  bool kept = false;
};

class RandomPlans {
 public:
  RandomPlans(uint32_t seed, int64_t device_blocks, int64_t host_blocks)
      : rng_(seed), device_blocks_(device_blocks), host_blocks_(host_blocks) {
    KvStoreOptions options = {.layout = kLayout,
                              .device_bytes = device_blocks * kLayout.block_bytes() + 700,
                              .host_bytes = host_blocks * 12288,
                              .num_slots = kSlots,
                              .max_blocks_per_slot = kBlocksPerSlot,
                              .freed_memory = FreedMemory::kPoisoned};
    store_ = KvStore::Create(options).value();
  }

  void Plan() {
    ASSERT_EQ(store_->host_blocks(), host_blocks_);
    switch (rng_() % 10) {
      case 0:
      case 1:
        Open();
        break;
      case 2:
        Get();
        break;
      case 3:
        Drop();
        break;
      case 4:
        Truncate();
        break;
      case 5:
        ForgetHandle();
        break;
      default:
        Step();
    }
    if (::testing::Test::HasFatalFailure()) return;
    Compare();
  }
  // Whatever happened, everything can be given back.
  void LetGoOfEverything() {
    for (int64_t slot = 0; slot < kSlots; ++slot) UnbindFrom(slot, 0);
    while (!handles_.empty()) ForgetHandle();
    for (auto& [id, block] : model_) store_->Drop(BlockId(id));
    EXPECT_EQ(store_->stats().host_blocks_used, 0);
    EXPECT_EQ(store_->stats().device_pages_used, 0);
  }
  KvStoreStats stats() const { return store_->stats(); }

 private:
  void Open() {
    int64_t open = 0;
    for (const auto& [id, block] : model_) open += block.sealed ? 0 : 1;
    const bool fits = static_cast<int64_t>(model_.size()) < host_blocks_ && open < device_blocks_;
    absl::StatusOr<Block> block = store_->Open(BlockId(next_id_));
    ASSERT_EQ(block.ok(), fits) << block.status();
    if (!fits) return;
    model_[next_id_] = {.handles = 1, .rows = 0, .sealed = false, .kept = false};
    Place(next_id_++, *std::move(block));
  }
  // Appends the block to a slot, puts it in the place of another, or keeps it outside.
  void Place(int64_t id, Block block) {
    const size_t slot = rng_() % kSlots;
    if (!bound_[slot].empty() && rng_() % 8 == 0) {
      const size_t index = rng_() % bound_[slot].size();
      const int64_t replaced = std::exchange(bound_[slot][index], id);
      store_->Bind(static_cast<int64_t>(slot), static_cast<int64_t>(index), std::move(block));
      --model_[replaced].handles;
      Settle(replaced);
      return;
    }
    if (bound_[slot].size() == kBlocksPerSlot || rng_() % 8 == 0) {
      handles_.emplace_back(id, std::move(block));
      return;
    }
    store_->Bind(static_cast<int64_t>(slot), static_cast<int64_t>(bound_[slot].size()),
                 std::move(block));
    bound_[slot].push_back(id);
  }
  // Mostly of a block that there is.
  int64_t PickId() {
    if (model_.empty() || rng_() % 8 == 0) {
      return static_cast<int64_t>(rng_() % static_cast<uint64_t>(next_id_ + 1));
    }
    return std::next(model_.begin(), static_cast<int64_t>(rng_() % model_.size()))->first;
  }
  void Get() {
    const int64_t id = PickId();
    absl::StatusOr<Block> block = store_->Get(BlockId(id));
    ASSERT_EQ(block.ok(), model_.contains(id)) << id;
    if (!block.ok()) return;
    ++model_[id].handles;
    Place(id, *std::move(block));
  }
  void Drop() {
    const int64_t id = PickId();
    store_->Drop(BlockId(id));
    if (!model_.contains(id)) return;
    model_[id].kept = false;
    Settle(id);
  }
  void Truncate() {
    const size_t slot = rng_() % kSlots;
    UnbindFrom(static_cast<int64_t>(slot),
               rng_() % 2 == 0 ? 0 : static_cast<int64_t>(rng_() % (bound_[slot].size() + 1)));
  }
  void UnbindFrom(int64_t slot, int64_t first) {
    std::vector<int64_t>& bound = bound_[static_cast<size_t>(slot)];
    store_->Unbind(slot, first);
    while (static_cast<int64_t>(bound.size()) > first) {
      const int64_t id = bound.back();
      bound.pop_back();
      --model_[id].handles;
      Settle(id);
    }
  }
  void ForgetHandle() {
    if (handles_.empty()) return;
    const size_t i = rng_() % handles_.size();
    const int64_t id = handles_[i].first;
    handles_.erase(handles_.begin() + static_cast<int64_t>(i));
    --model_[id].handles;
    Settle(id);
  }
  void Settle(int64_t id) {
    if (!model_[id].kept && model_[id].handles == 0) model_.erase(id);
  }

  void Step() {
    const PagedKv kv = store_->BeginStep(++step_);
    std::optional<std::pair<int64_t, Block>> gone;
    if (!handles_.empty() && rng_() % 4 == 0) {
      gone = std::move(handles_.back());  // a handle that goes while the step runs
      handles_.pop_back();
      gone->second = Block();
    }
    for (int64_t slot = 0; slot < kSlots; ++slot) {
      const std::vector<int64_t>& bound = bound_[static_cast<size_t>(slot)];
      for (int64_t index = 0; index < static_cast<int64_t>(bound.size()); ++index) {
        const int64_t id = bound[static_cast<size_t>(index)];
        Append(kv, slot, index, id);
        if (rng_() % 2 == 0) Read(kv, slot, index, id);
      }
    }
    ASSERT_TRUE(store_->EndStep().ok());
    ASSERT_TRUE(store_->TakeCorrupt().empty());
    if (gone.has_value()) {
      --model_[gone->first].handles;
      Settle(gone->first);
    }
    for (auto& [id, block] : model_) {
      if (block.sealed || block.rows < kBlockTokens || rng_() % 4 == 0) continue;
      PrefixHash hash{};
      hash[0] = static_cast<uint8_t>(id);
      ASSERT_TRUE(store_->Seal(BlockId(id), hash).ok());
      block.sealed = block.kept = true;
    }
  }
  void Append(const PagedKv& kv, int64_t slot, int64_t index, int64_t id) {
    ModelBlock& block = model_.at(id);
    if (block.rows == kBlockTokens) return;
    const int64_t begin = block.rows;
    block.rows = std::min(kBlockTokens, begin + 16 + static_cast<int64_t>(rng_() % 49));
    for (int64_t layer = 0; layer < kLayout.num_layers; ++layer) {
      for (int64_t head = 0; head < kLayout.num_kv_heads; ++head) {
        const kernels::PageRef ref = kv.Peek(slot, index, layer, head);
        ASSERT_EQ(ref.tier(), PageTier::kDevice) << "open blocks live in the device tier";
        for (int64_t token = begin; token < block.rows; ++token) {
          for (int64_t row : {token, token + kBlockTokens}) {
            const uint32_t value = Pattern(id, layer, head, row);
            std::memcpy(ref.page() + row * kLayout.row_bytes(), &value, sizeof(value));
          }
        }
        const uint32_t bounds[2] = {Pattern(id, layer, head, 1000), Pattern(id, layer, head, 1001)};
        std::memcpy(kv.Bounds(slot, index, layer, head), bounds, sizeof(bounds));
      }
    }
  }
  void Read(const PagedKv& kv, int64_t slot, int64_t index, int64_t id) {
    const ModelBlock& block = model_.at(id);
    const int64_t layer = static_cast<int64_t>(rng_() % 2);
    const int64_t head = static_cast<int64_t>(rng_() % 2);
    const int64_t repeats = 1 + static_cast<int64_t>(rng_() % 3);
    const kernels::PageRef ref =
        kv.Read(slot, index, layer, head, repeats * kLayout.page_bytes() / 2);
    ASSERT_NE(ref.tier(), PageTier::kAbsent);
    for (int64_t token = 0; token < block.rows; ++token) {
      for (int64_t row : {token, token + kBlockTokens}) {
        uint32_t value = 0;
        std::memcpy(&value, ref.page() + row * kLayout.row_bytes(), sizeof(value));
        ASSERT_EQ(value, Pattern(id, layer, head, row)) << "block " << id << " row " << row;
      }
    }
    uint32_t bounds[2];
    std::memcpy(bounds, kv.Bounds(slot, index, layer, head), sizeof(bounds));
    ASSERT_EQ(bounds[0], Pattern(id, layer, head, 1000));
    ASSERT_EQ(bounds[1], Pattern(id, layer, head, 1001));
  }

  void Compare() {
    const absl::Status integrity = store_->CheckIntegrity();
    ASSERT_TRUE(integrity.ok()) << integrity;
    ASSERT_EQ(store_->stats().host_blocks_used, static_cast<int64_t>(model_.size()));
    for (const auto& [id, block] : model_) ASSERT_TRUE(store_->Holds(BlockId(id)));
  }

  std::mt19937 rng_;
  const int64_t device_blocks_;
  const int64_t host_blocks_;
  std::unique_ptr<KvStore> store_;
  std::map<int64_t, ModelBlock> model_;
  std::vector<int64_t> bound_[kSlots];
  std::vector<std::pair<int64_t, Block>> handles_;
  int64_t next_id_ = 0;
  uint32_t step_ = 0;
};

struct Sizes {
  uint32_t seed;
  int64_t device_blocks;
  int64_t host_blocks;
};

class KvStoreResidencyTest : public ::testing::TestWithParam<Sizes> {};

TEST_P(KvStoreResidencyTest, EveryReadGivesTheBytesThatWereWritten) {
  const Sizes sizes = GetParam();
  RandomPlans plans(sizes.seed, sizes.device_blocks, sizes.host_blocks);
  const int64_t count = testing::Iterations(100000);
  for (int64_t i = 0; i < count; ++i) {
    plans.Plan();
    if (HasFatalFailure()) FAIL() << "plan " << i << ", seed " << sizes.seed;
  }
  const KvStoreStats stats = plans.stats();
  EXPECT_GT(stats.device_hits, count / 10);
  if (sizes.device_blocks < sizes.host_blocks) {
    EXPECT_GT(stats.device_misses, count / 50);
    EXPECT_GT(stats.promotions, count / 100);
    EXPECT_GT(stats.evictions, count / 50);
  }
  plans.LetGoOfEverything();
}

INSTANTIATE_TEST_SUITE_P(Seeds, KvStoreResidencyTest,
                         ::testing::Values(Sizes{1, 2, 6}, Sizes{2, 3, 9}, Sizes{3, 4, 16},
                                           Sizes{4, 8, 8}));

}  // namespace
}  // namespace kvasir::kvstore
