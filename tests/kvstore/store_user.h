// What tests do with a KV store over a tier below: seal blocks whose content follows from a name,
// restore them, and look at their bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <gtest/gtest.h>
#include <memory>

#include "kvstore/kv_store.h"
#include "tests/kvstore/test_blocks.h"

namespace kvasir::kvstore {

struct StoreUser {
  // Writes a block called `name`, whose pages, bounds and tokens follow from the name, and seals
  // it.
  void MakeSealed(int64_t id, uint32_t name, const PrefixHash& owner = {}) {
    const Block block = store_->Open(BlockId(id)).value();
    store_->Bind(0, 0, block);
    const kernels::PagedKv kv = store_->BeginStep(++step_).value();
    ForEachByte(kv, name, [](std::byte& byte, std::byte expected) { byte = expected; });
    ASSERT_TRUE(store_->EndStep().ok());
    ASSERT_TRUE(store_->Seal(BlockId(id), HashOf(name), TokensOf(name), owner).ok());
    store_->Unbind(0, 0);
  }
  void ExpectHolds(int64_t id, uint32_t name) {
    store_->Bind(0, 0, store_->Get(BlockId(id)).value());
    const kernels::PagedKv kv = store_->BeginStep(++step_).value();
    int64_t wrong = 0;
    ForEachByte(kv, name,
                [&](std::byte& byte, std::byte expected) { wrong += byte == expected ? 0 : 1; });
    EXPECT_EQ(wrong, 0) << "block " << id;
    ASSERT_TRUE(store_->EndStep().ok());
    store_->Unbind(0, 0);
  }
  absl::Status Restore(int64_t id, uint32_t name, const PrefixHash& owner = {}) {
    const absl::Status started = store_->Restore(BlockId(id), HashOf(name), owner);
    if (!started.ok()) return started;
    for (;;) {
      store_->PollTier();
      for (const RestoredBlock& restored : store_->TakeRestored()) {
        EXPECT_EQ(restored.id, BlockId(id));
        return restored.status;
      }
    }
  }

  ErasedBlocks Erase(const PrefixHash& owner) {
    store_->Erase({.ticket = 1, .owner = owner});
    for (;;) {
      store_->PollTier();
      for (const ErasedBlocks& erased : store_->TakeErased()) return erased;
    }
  }
  void Flush() { EXPECT_EQ(store_->Flush(absl::InfiniteDuration()), absl::OkStatus()); }

  std::unique_ptr<KvStore> store_;
  uint32_t step_ = 0;
};

}  // namespace kvasir::kvstore
