// Which token blocks are stored in the ranks' disk tiers, by prefix hash: where the prefix index
// ends, the coordinator follows a prompt's chain on here. A block counts only when every rank holds
// it, since all ranks run the same plan. It holds what the ranks have reported and nothing else: no
// order of use, no capacity; each rank evicts by itself and says so. Called by the scheduler.
// Thread-compatible.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/types/span.h"

#include "kvstore/block.h"
#include "kvstore/index/prefix_index.h"

namespace kvasir::kvstore {

struct StoredIndexStats {
  int64_t blocks = 0;  // that every rank holds
  int64_t partly_held = 0;
  int64_t hash_collisions = 0;  // equal hash values, different tokens
};

class StoredIndex {
 public:
  explicit StoredIndex(int64_t num_ranks, BlockHasher hasher = HashBlock)
      : num_ranks_(num_ranks), hasher_(std::move(hasher)) {}

  // `rank` holds the block; again is nothing new. When it names other tokens than another rank did,
  // they do not hold the same block: the later word replaces the earlier ones.
  // REQUIRES: rank < num_ranks, kBlockTokens tokens.
  void Stored(int64_t rank, const PrefixHash& hash, absl::Span<const int32_t> tokens);
  void Forgotten(int64_t rank, const PrefixHash& hash);

  // The blocks from the `first`-th of a sequence on, behind `parent`, that hold `tokens`, as long
  // as every rank holds them, at most floor((N-1)/64): at least one token is left to compute.
  // Tokens are compared.
  std::vector<PrefixHash> Match(const PrefixHash& parent, absl::Span<const int32_t> tokens,
                                int64_t first = 0, const DecodePart& decode = {});
  bool HeldByAll(const PrefixHash& hash) const;

  StoredIndexStats stats() const;

 private:
  struct Record {
    std::array<int32_t, kBlockTokens> tokens{};
    int64_t num_holders = 0;
    std::vector<bool> holders;  // [rank]
  };

  const int64_t num_ranks_;
  const BlockHasher hasher_;
  absl::flat_hash_map<PrefixHash, Record> records_;  // of blocks that some rank holds
  int64_t held_by_all_ = 0;
  int64_t hash_collisions_ = 0;
};

}  // namespace kvasir::kvstore
