// The stores of a rank's KV heads as one tier of whole blocks: a block is held when every head's
// store holds it, and a read or write ends with the last of them. A block that some stores lack is
// a miss; writing it again completes it. Made by the worker. Thread-compatible as a Tier.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"

#include "kvstore/format/page_format.h"
#include "kvstore/tiers/tier.h"

namespace kvasir::kvstore {

class HeadStores : public Tier {
 public:
  // The tiers are given extents of `format`, of which each writes and reads its part, and none the
  // header. REQUIRES: at least one.
  HeadStores(const ExtentFormat& format, std::vector<std::unique_ptr<Tier>> heads);

  void Write(std::vector<TierWrite> writes) override;
  void Read(std::vector<TierRead> reads) override;
  void Pin(absl::Span<const PrefixHash> blocks) override;
  void Unpin(absl::Span<const PrefixHash> blocks) override;
  bool Erase(TierErase erase) override;
  TierEvents Poll() override;
  void Wait() override;
  const ExtentFormat& format() const override { return format_; }
  bool Holds(const PrefixHash& hash) const override;
  std::unique_ptr<HeldExtent> Hold(const PrefixHash& hash) override;
  std::unique_ptr<IoQueue> NewReadQueue() override;
  void ForgetDamaged(const PrefixHash& hash, absl::StatusCode why) override {
    for (const auto& head : heads_) head->ForgetDamaged(hash, why);
  }
  std::vector<StoredBlock> Inventory() const override;
  uint64_t first_generation() const override;
  // Counts of blocks are those of whole blocks, except of damage: a block counts for each head that
  // is damaged.
  TierStats stats() const override;

 private:
  struct Request {
    size_t left = 0;                  // heads that have not ended it
    absl::Span<std::byte> read = {};  // empty for a write
    BlockIdentity block = {};         // as the first head's store has it
    absl::Status status = {};         // the first error
  };

  // Takes the events of the heads into events_.
  void Collect();
  void End(size_t head, TierCompletion completion);
  void EndErase(size_t head, const TierErased& erased);

  const ExtentFormat format_;
  const std::vector<std::unique_ptr<Tier>> heads_;
  std::vector<int64_t> in_flight_;                   // [head]
  absl::flat_hash_map<uint64_t, Request> requests_;  // by ticket
  struct Erasing {
    size_t left = 0;  // heads that have not ended it
    TierErased sums;
  };
  absl::flat_hash_map<uint64_t, Erasing> erasing_;  // by ticket
  TierEvents events_;
};

}  // namespace kvasir::kvstore
