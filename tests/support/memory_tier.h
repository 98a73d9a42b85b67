// A Tier in memory whose requests end late and in any order, and that fails and forgets at random.
// It looks at the memory of a write when it ends, and spoils that of a read until then: a store
// that touches either too early is found out. Thread-compatible.
#pragma once

#include <cstring>
#include <gtest/gtest.h>
#include <iterator>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kvstore/format/page_format.h"
#include "kvstore/tiers/tier.h"

namespace kvasir::kvstore {

struct MemoryTierFaults {
  double refuse_write = 0;
  double fail_read = 0;  // and forget the block
  double forget = 0;     // some block, at each poll
};

class MemoryTier : public Tier {
 public:
  MemoryTier(const ExtentFormat& format, uint32_t seed, MemoryTierFaults faults = {})
      : format_(format), faults_(faults), rng_(seed) {}

  void Write(std::vector<TierWrite> writes) override {
    std::move(writes.begin(), writes.end(), std::back_inserter(writes_));
  }
  void Read(std::vector<TierRead> reads) override {
    for (const TierRead& read : reads) std::memset(read.extent.data(), 0xff, read.extent.size());
    std::move(reads.begin(), reads.end(), std::back_inserter(reads_));
  }
  TierEvents Poll() override {
    if (!blocks_.empty() && Hits(faults_.forget)) {
      Forget(std::next(blocks_.begin(), static_cast<int64_t>(rng_() % blocks_.size()))->first);
    }
    for (size_t i = writes_.size(); i-- > 0;) {
      if (rng_() % 2 == 0) EndWrite(i);
    }
    for (size_t i = reads_.size(); i-- > 0;) {
      if (rng_() % 2 == 0) EndRead(i);
    }
    return std::exchange(events_, {});
  }
  void Wait() override {
    if (!events_.completions.empty()) return;
    if (!reads_.empty()) {
      EndRead(0);
    } else if (!writes_.empty()) {
      EndWrite(0);
    }
  }

  const ExtentFormat& format() const override { return format_; }
  bool Holds(const PrefixHash& hash) const override { return blocks_.contains(hash); }
  std::vector<StoredBlock> Inventory() const override {
    std::vector<StoredBlock> inventory;
    for (const auto& [hash, block] : blocks_) {
      inventory.push_back({.hash = hash, .tokens = block.identity.tokens});
    }
    return inventory;
  }
  uint64_t first_generation() const override { return uint64_t{7} << 32; }
  TierStats stats() const override {
    TierStats stats;
    stats.blocks = static_cast<int64_t>(blocks_.size());
    return stats;
  }

 private:
  struct Stored {
    BlockIdentity identity;
    std::vector<std::byte> extent;
  };

  bool Hits(double chance) { return std::uniform_real_distribution<double>(0, 1)(rng_) < chance; }
  void Forget(PrefixHash hash) {
    if (blocks_.erase(hash) > 0) events_.forgotten.push_back(hash);
  }
  void EndWrite(size_t i) {
    const TierWrite write = writes_[i];
    writes_.erase(writes_.begin() + static_cast<int64_t>(i));
    TierCompletion completion = {.ticket = write.ticket, .status = {}, .block = {}};
    if (Hits(faults_.refuse_write)) {
      completion.status = absl::UnavailableError("refused on purpose");
    } else {
      const absl::Status whole = format_.Verify(write.block, write.extent);
      EXPECT_TRUE(whole.ok()) << "written extent: " << whole;
      blocks_[write.block.hash] = {
          .identity = write.block,
          .extent = std::vector<std::byte>(write.extent.begin(), write.extent.end())};
    }
    events_.completions.push_back(std::move(completion));
  }
  void EndRead(size_t i) {
    const TierRead read = reads_[i];
    reads_.erase(reads_.begin() + static_cast<int64_t>(i));
    TierCompletion completion = {.ticket = read.ticket, .status = {}, .block = {}};
    const auto it = blocks_.find(read.hash);
    if (it == blocks_.end()) {
      completion.status = absl::NotFoundError("not here");
    } else if (Hits(faults_.fail_read)) {
      completion.status = absl::DataLossError("damaged on purpose");
      Forget(read.hash);
    } else {
      std::memcpy(read.extent.data(), it->second.extent.data(), read.extent.size());
      completion.block = it->second.identity;
    }
    events_.completions.push_back(std::move(completion));
  }

  const ExtentFormat format_;
  const MemoryTierFaults faults_;
  std::mt19937 rng_;
  std::map<PrefixHash, Stored> blocks_;
  std::vector<TierWrite> writes_;
  std::vector<TierRead> reads_;
  TierEvents events_;
};

}  // namespace kvasir::kvstore
