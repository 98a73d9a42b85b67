// The residency protocol against a naive model: after random plans, every byte that a kernel can
// reach must be what was written, whatever tier holds it (KVASIR_TEST_SCALE=100 for 1e7 plans).
#include <array>
#include <cstring>
#include <gtest/gtest.h>
#include <iterator>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <utility>

#include "kvstore/kv_store.h"
#include "tests/support/iterations.h"
#include "tests/support/memory_tier.h"

namespace kvasir::kvstore {
namespace {

using kernels::KvLayout;
using kernels::PagedKv;
using kernels::PageTier;

constexpr KvLayout kLayout = {
    .num_layers = 2, .num_kv_heads = 2, .head_dim = 2, .dtype = kernels::DType::kBFloat16};
constexpr int64_t kSlots = 3;
constexpr int64_t kBlocksPerSlot = 6;

// Returns the content of token row `row` (K rows, then V rows) of a page of the block.
uint32_t Pattern(int64_t id, int64_t layer, int64_t head, int64_t row) {
  return static_cast<uint32_t>(id * 2654435761 + layer * 65537 + head * 257 + row * 3 + 1);
}

PrefixHash HashOf(int64_t content) {
  PrefixHash hash{};
  std::memcpy(hash.data(), &content, sizeof(content));
  return hash;
}

struct ModelBlock {
  int64_t content = 0;  // id of the block that was written; others are restored copies
  bool reading = false;
  int64_t handles = 0;  // of the test and of slots
  int64_t rows = 0;     // tokens written
  bool sealed = false;
  bool kept = false;
};

struct Sizes {
  uint32_t seed = 0;
  int64_t device_blocks = 0;
  int64_t host_blocks = 0;
  int64_t spare_blocks = 0;  // 0: no tier below
  MemoryTierFaults faults = {};
};

class RandomPlans {
 public:
  explicit RandomPlans(const Sizes& sizes)
      : rng_(sizes.seed),
        device_blocks_(sizes.device_blocks),
        host_blocks_(sizes.host_blocks),
        has_tier_(sizes.spare_blocks > 0) {
    KvStoreOptions options = {.shard = {.layout = kLayout},
                              .device_bytes = device_blocks_ * kLayout.block_bytes() + 700,
                              .host_bytes = (host_blocks_ + sizes.spare_blocks) * 12288,
                              .num_slots = kSlots,
                              .max_blocks_per_slot = kBlocksPerSlot,
                              .freed_memory = FreedMemory::kPoisoned};
    std::unique_ptr<Tier> tier;
    if (has_tier_) {
      tier = std::make_unique<MemoryTier>(ExtentFormat::Create(options.shard).value(), sizes.seed,
                                          sizes.faults);
    }
    store_ = KvStore::Create(options, std::move(tier)).value();
  }

  void Plan() {
    ASSERT_EQ(store_->host_blocks(), host_blocks_);
    switch (rng_() % (has_tier_ ? 13 : 10)) {
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
      case 10:
        Persist();
        break;
      case 11:
        Restore();
        break;
      case 12:
        store_->PollTier();
        break;
      default:
        Step();
    }
    if (::testing::Test::HasFatalFailure()) return;
    CollectFromTier();
    Compare();
  }
  // Whatever happened, everything can be freed.
  void ReleaseEverything() {
    for (int64_t slot = 0; slot < kSlots; ++slot) UnbindFrom(slot, 0);
    while (!handles_.empty()) ForgetHandle();
    for (auto& [id, block] : model_) store_->Drop(BlockId(id));
    EXPECT_EQ(store_->Flush(absl::InfiniteDuration()), absl::OkStatus());
    CollectFromTier();
    std::set<PrefixHash> inventory;
    for (const StoredBlock& block : store_->Inventory()) inventory.insert(block.hash);
    EXPECT_EQ(stored_, inventory);
    EXPECT_EQ(store_->stats().host_blocks_used, 0);
    EXPECT_EQ(store_->stats().device_pages_used, 0);
  }
  KvStoreStats stats() const { return store_->stats(); }

 private:
  void Open() {
    int64_t open = 0;
    for (const auto& [id, block] : model_) open += block.sealed || block.reading ? 0 : 1;
    const bool fits = static_cast<int64_t>(model_.size()) < host_blocks_ && open < device_blocks_;
    absl::StatusOr<Block> block = store_->Open(BlockId(next_id_));
    ASSERT_EQ(block.ok(), fits) << block.status();
    if (!fits) return;
    model_[next_id_] = {.content = next_id_, .handles = 1};
    Place(next_id_++, *std::move(block));
  }
  // Appends the block to a slot, replaces another with it, or keeps it outside.
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
  // Mostly a block that exists.
  int64_t PickId() {
    if (model_.empty() || rng_() % 8 == 0) {
      return static_cast<int64_t>(rng_() % static_cast<uint64_t>(next_id_ + 1));
    }
    return std::next(model_.begin(), static_cast<int64_t>(rng_() % model_.size()))->first;
  }
  void Get() {
    const int64_t id = PickId();
    absl::StatusOr<Block> block = store_->Get(BlockId(id));
    ASSERT_EQ(block.ok(), model_.contains(id) && !model_[id].reading) << id;
    if (!block.ok()) return;
    ++model_[id].handles;
    Place(id, *std::move(block));
  }
  void Persist() {
    const int64_t id = PickId();
    std::array<int32_t, kBlockTokens> tokens;
    tokens.fill(model_.contains(id) ? static_cast<int32_t>(model_[id].content) : -1);
    store_->Persist(BlockId(id), tokens);
  }
  void Restore() {
    // Mostly a block that was stored once.
    const int64_t content =
        persisted_.empty() || rng_() % 8 == 0
            ? static_cast<int64_t>(rng_() % static_cast<uint64_t>(next_id_ + 1))
            : *std::next(persisted_.begin(), static_cast<int64_t>(rng_() % persisted_.size()));
    bool stored = false;
    for (const StoredBlock& block : store_->Inventory()) stored |= block.hash == HashOf(content);
    const absl::Status status = store_->Restore(BlockId(next_id_), HashOf(content));
    if (!stored) {
      ASSERT_EQ(status.code(), absl::StatusCode::kNotFound);
    } else if (static_cast<int64_t>(model_.size()) == host_blocks_) {
      ASSERT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
    } else {
      ASSERT_TRUE(status.ok()) << status;
      model_[next_id_++] = {
          .content = content, .reading = true, .handles = 0, .rows = kBlockTokens, .kept = true};
    }
  }
  void CollectFromTier() {
    for (const RestoredBlock& restored : store_->TakeRestored()) {
      const auto it = model_.find(restored.id.value);
      ASSERT_TRUE(it != model_.end() && it->second.reading) << restored.id;
      if (restored.status.ok()) {
        it->second.reading = false;
        it->second.sealed = true;
        ASSERT_TRUE(store_->Where(restored.id).restored);
      } else {
        model_.erase(it);
      }
    }
    const StoredChanges changes = store_->TakeStoredChanges();
    for (const StoredBlock& block : changes.stored) {
      ASSERT_EQ(block.hash, HashOf(block.tokens[63]));
      stored_.insert(block.hash);
      persisted_.insert(block.tokens[63]);
    }
    for (const PrefixHash& hash : changes.forgotten) stored_.erase(hash);
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
    const PagedKv kv = store_->BeginStep(++step_).value();
    std::optional<std::pair<int64_t, Block>> gone;
    if (!handles_.empty() && rng_() % 4 == 0) {
      gone = std::move(handles_.back());  // a handle that is destroyed while the step runs
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
      if (block.sealed || block.reading || block.rows < kBlockTokens || rng_() % 4 == 0) continue;
      ASSERT_TRUE(
          store_->Seal(BlockId(id), HashOf(block.content), std::vector<int32_t>(kBlockTokens))
              .ok());
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
            const uint32_t value = Pattern(block.content, layer, head, row);
            std::memcpy(ref.page() + row * kLayout.row_bytes(), &value, sizeof(value));
          }
        }
        const uint32_t bounds[2] = {Pattern(block.content, layer, head, 1000),
                                    Pattern(block.content, layer, head, 1001)};
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
        ASSERT_EQ(value, Pattern(block.content, layer, head, row))
            << "block " << id << " row " << row;
      }
    }
    uint32_t bounds[2];
    std::memcpy(bounds, kv.Bounds(slot, index, layer, head), sizeof(bounds));
    ASSERT_EQ(bounds[0], Pattern(block.content, layer, head, 1000));
    ASSERT_EQ(bounds[1], Pattern(block.content, layer, head, 1001));
  }

  void Compare() {
    const absl::Status integrity = store_->CheckIntegrity();
    ASSERT_TRUE(integrity.ok()) << integrity;
    ASSERT_EQ(store_->stats().host_blocks_used, static_cast<int64_t>(model_.size()));
    for (const auto& [id, block] : model_) ASSERT_EQ(store_->Holds(BlockId(id)), !block.reading);
  }

  std::mt19937 rng_;
  const int64_t device_blocks_;
  const int64_t host_blocks_;
  const bool has_tier_;
  std::unique_ptr<KvStore> store_;
  std::set<PrefixHash> stored_;  // as reported
  std::set<int64_t> persisted_;  // contents that were stored once
  std::map<int64_t, ModelBlock> model_;
  std::vector<int64_t> bound_[kSlots];
  std::vector<std::pair<int64_t, Block>> handles_;
  int64_t next_id_ = 0;
  uint32_t step_ = 0;
};

class KvStoreResidencyTest : public ::testing::TestWithParam<Sizes> {};

TEST_P(KvStoreResidencyTest, EveryReadGivesTheBytesThatWereWritten) {
  const Sizes sizes = GetParam();
  RandomPlans plans(sizes);
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
  if (sizes.spare_blocks > 0) {
    EXPECT_GT(stats.restored_blocks, count / 200);
    EXPECT_EQ(stats.failed_restores > 0, sizes.faults.fail_read > 0);
  }
  plans.ReleaseEverything();
}

constexpr MemoryTierFaults kFaults = {.refuse_write = 0.2, .fail_read = 0.2, .forget = 0.02};

INSTANTIATE_TEST_SUITE_P(Seeds, KvStoreResidencyTest,
                         ::testing::Values(Sizes{1, 2, 6}, Sizes{2, 3, 9}, Sizes{3, 4, 16},
                                           Sizes{4, 8, 8}, Sizes{5, 2, 6, 1}, Sizes{6, 3, 20, 1},
                                           Sizes{7, 2, 6, 1, kFaults},
                                           Sizes{8, 4, 40, 2, kFaults}));

}  // namespace
}  // namespace kvasir::kvstore
