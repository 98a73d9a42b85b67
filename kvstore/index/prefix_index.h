// Which token blocks exist and which prefixes they hold: the coordinator's half of the KV store. It
// hands out block ids, finds the longest cached prefix of a prompt, decides which idle block goes
// when room is needed (least recently used first, never one that a sequence holds), and knows per
// rank who lost what. It holds no KV bytes. Hidden: the hash chain, the LRU order, the bookkeeping
// of ranks. Thread-compatible: the scheduler's thread only.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#include "kvstore/block.h"

namespace kvasir::kvstore {

// Everything besides tokens that decides what the KV of a prefix is. Fields are tagged and
// length-prefixed in the hash, so no two different scopes collide.
struct PrefixScope {
  std::string tenant;
  std::string weights_hash;    // 32 bytes
  std::string kv_form;         // "rotated/bfloat16"
  std::string prefill_policy;  // canonical bytes of the prefill part of the policy
};

// The first link of a chain.
PrefixHash HashScope(const PrefixScope& scope);
// The link of a full block of tokens behind `parent`. `decode_policy` is empty but for blocks
// written during a sparse decode. SHA-256.
PrefixHash HashBlock(const PrefixHash& parent, absl::Span<const int32_t> tokens,
                     absl::string_view decode_policy);

struct PrefixMatch {
  std::vector<Block> blocks;  // from position 0 on, held by these handles
  PrefixHash last{};          // chain value behind them
};

struct PrefixIndexStats {
  int64_t capacity_blocks = 0;
  int64_t held_blocks = 0;  // by handles
  int64_t idle_blocks = 0;  // cached, evictable
  int64_t evictions = 0;
};

class PrefixIndex {
 public:
  // `capacity_blocks`: blocks that every rank's host tier can hold.
  static std::unique_ptr<PrefixIndex> Create(int64_t capacity_blocks);
  virtual ~PrefixIndex() = default;

  // The longest run of cached full blocks at the start of `tokens`, at most floor((N-1)/64): at
  // least one token is left to compute. Tokens are compared, not only hashes.
  virtual PrefixMatch Match(const PrefixHash& scope, absl::Span<const int32_t> tokens) = 0;
  // A fresh id with a handle; evicts the least recently used idle block when full;
  // RESOURCE_EXHAUSTED
  // ("need 1 block, 0 of 128 idle") when all are held.
  virtual absl::StatusOr<Block> Allocate() = 0;
  // Blocks that Allocate can still give: free and idle ones.
  virtual int64_t available_blocks() const = 0;
  // The block is full and may be found from now on. Returns false when an equal prefix is cached
  // already (two sequences computed the same): then the block stays private to its holders.
  virtual bool Publish(const Block& block, const PrefixHash& parent, const PrefixHash& hash,
                       absl::Span<const int32_t> tokens) = 0;
  // Ids released since the last call: no rank need keep them.
  virtual std::vector<BlockId> TakeDropped() = 0;
  // A rank lost the block (or never had it): it is not a hit any more.
  virtual void Lost(BlockId id) = 0;
  // Forgets every cached block (the group was formed anew). REQUIRES: no handles are out.
  virtual void Clear() = 0;

  virtual PrefixIndexStats stats() const = 0;
  // Every block is in exactly one of free, held, idle; INTERNAL with the discrepancy. For tests.
  virtual absl::Status CheckIntegrity() const = 0;
};

}  // namespace kvasir::kvstore
