// Which token blocks exist and which prefixes they hold: the coordinator's half of the KV store. It
// hands out block ids (never the same twice), finds the longest cached prefix of a prompt, and
// decides which idle block goes when room is needed. It holds no KV bytes. It hides the hash chain,
// the LRU order and the tree of prefixes. Called by the scheduler. Thread-compatible: only the
// scheduler's thread calls it and destroys the handles. The index outlives the handles.
//
// Every block is in exactly one state:
//   free    not allocated
//   held    somebody has a handle to it or to a cached block that continues it
//   idle    cached, and neither it nor anything that continues it is held: evictable
// A held block keeps its whole prefix held, so a parent always becomes idle after its children:
// evicting the longest idle block takes leaves first and never makes a cached block unreachable.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#include "kvstore/format/block.h"
#include "kvstore/index/block_listener.h"

namespace kvasir::kvstore {

// Everything besides tokens that the KV of a prefix depends on. Fields are tagged and
// length-prefixed in the hash, so no two different scopes collide.
struct PrefixScope {
  std::string tenant;
  std::string weights_hash;    // 32 bytes
  std::string kv_form;         // "rotated/bfloat16"; "unrotated..." where positions are extended
  std::string prefill_policy;  // canonical bytes of the prefill part of the policy
};

// Returns the name of a tenant in headers of blocks: its blocks of all scopes.
PrefixHash HashOwner(absl::string_view tenant);
// Returns the first link of a chain.
PrefixHash HashScope(const PrefixScope& scope);
// The link of a full block of tokens after `parent`. `decode_policy` is empty except for blocks
// written during a sparse decode. SHA-256.
PrefixHash HashBlock(const PrefixHash& parent, absl::Span<const int32_t> tokens,
                     absl::string_view decode_policy);
// HashBlock; tests play a weak hash in its place.
using BlockHasher = std::function<PrefixHash(
    const PrefixHash& parent, absl::Span<const int32_t> tokens, absl::string_view decode_policy)>;

// The positions of a sequence whose KV depends on the decode part of its policy: those from `begin`
// on. Blocks that reach beyond `begin` have `key` in their hash, which names the decode part and
// the position: a sequence with the same tokens and the same key would compute them, and no other.
struct DecodePart {
  int64_t begin = std::numeric_limits<int64_t>::max();
  std::string key = {};

  absl::string_view KeyOf(int64_t block_index) const {
    const bool before = begin >= (block_index + 1) * kBlockTokens;
    return before ? absl::string_view() : absl::string_view(key);
  }
};

struct PrefixMatch {
  std::vector<Block> blocks;       // from position 0 on, held by these handles
  std::vector<PrefixHash> hashes;  // chain value after each
};

// A full block and the place of its tokens.
struct FullBlock {
  const Block& block;
  const Block& before;               // the sequence's block before it; none before the first one
  const PrefixHash& parent;          // chain value before it; the scope's before the first one
  const PrefixHash& hash;            // chain value after it
  absl::Span<const int32_t> tokens;  // kBlockTokens of them
  PrefixHash owner{};                // HashOwner of the tenant
};

struct PrefixIndexStats {
  int64_t capacity_blocks = 0;
  int64_t held_blocks = 0;
  int64_t idle_blocks = 0;
  int64_t cached_blocks = 0;  // blocks that Match can find, held or idle
  int64_t evictions = 0;
  int64_t hash_collisions = 0;  // equal hash values, different tokens: not expected ever
};

class PrefixIndex {
 public:
  // `capacity_blocks`: number of blocks that every rank's host tier can hold. `listener` may be
  // null; it outlives the index.
  static std::unique_ptr<PrefixIndex> Create(int64_t capacity_blocks,
                                             BlockHasher hasher = HashBlock,
                                             BlockListener* listener = nullptr);
  virtual ~PrefixIndex() = default;

  // Returns the longest run of cached full blocks at the start of the N `tokens`, at most
  // floor((N-1)/64): at least one token is left to compute. Tokens of the whole prefix are
  // compared, not only hashes.
  virtual PrefixMatch Match(const PrefixHash& scope, absl::Span<const int32_t> tokens,
                            const DecodePart& decode = {}) = 0;
  // Returns a fresh id with a handle. Evicts the least recently used idle block when none is free.
  // RESOURCE_EXHAUSTED ("need 1 block, 128 of 128 are held") when all are held.
  virtual absl::StatusOr<Block> Allocate() = 0;
  // Number of blocks that Allocate can still give: free and idle ones. Only Allocate and Match
  // lower it.
  virtual int64_t available_blocks() const = 0;
  // Lets Match find a full block from now on. Does nothing when it can find the block already.
  // False when the block stays private to its holders: an equal prefix is cached already (two
  // sequences computed the same), or the prefix before it is not cached or only idle (publishing
  // must not take away available blocks). Private blocks are sealed on the ranks like others;
  // TakeDropped names them when their holders are gone.
  virtual bool Publish(const FullBlock& full) = 0;
  // Returns the ids released since the last call: no rank need keep them.
  virtual std::vector<BlockId> TakeDropped() = 0;
  // Makes room of an idle block that no cached one continues. False for any other.
  virtual bool EvictIdle(BlockId id) = 0;
  // No block of the owner is a hit any more; null: of any owner.
  virtual void LoseOwned(const PrefixHash* owner) = 0;
  // A rank lost the block, or never had it: neither the block nor one that continues it is a hit
  // any more. Ignores unknown ids.
  virtual void Lost(BlockId id) = 0;

  virtual PrefixIndexStats stats() const = 0;
  // INTERNAL, with the discrepancy, unless every block is in exactly one of the states free, held
  // and idle, and the tree and the LRU order keep their rules. For tests.
  virtual absl::Status CheckIntegrity() const = 0;
};

}  // namespace kvasir::kvstore
