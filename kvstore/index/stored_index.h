// Index, by prefix hash, of the token blocks stored in the ranks' disk tiers: where the prefix
// index ends, the coordinator continues a prompt's chain here. A block counts only when every rank
// holds it, since all ranks run the same plan. It holds what the ranks have reported and nothing
// else, neither order of use nor capacity: each rank evicts by itself and reports it. Called by the
// scheduler. Thread-compatible.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/types/span.h"

#include "kvstore/format/block.h"
#include "kvstore/index/prefix_index.h"

namespace kvasir::kvstore {

struct StoredIndexStats {
  int64_t blocks = 0;  // held by every rank
  int64_t partly_held = 0;
  int64_t hash_collisions = 0;  // equal hash values, different tokens
};

// A block of a sequence's chain.
struct StoredLink {
  PrefixHash hash;
  bool held = true;  // by every rank
};

class StoredIndex {
 public:
  // So many blocks in a row that some rank does not hold end a chain.
  static constexpr int64_t kMostMissing = 16;
  // Number of gaps in a chain, after which it ends: each costs a start of the sequence.
  static constexpr int64_t kMostGaps = 16;

  explicit StoredIndex(int64_t num_ranks, BlockHasher hasher = HashBlock)
      : num_ranks_(num_ranks), hasher_(std::move(hasher)) {}

  // Records that `rank` holds the block; a repetition changes nothing. Ranks that name different
  // tokens do not hold the same block: the later report replaces the earlier ones. REQUIRES: rank <
  // num_ranks, kBlockTokens tokens.
  void Stored(int64_t rank, const PrefixHash& hash, absl::Span<const int32_t> tokens);
  void Forgotten(int64_t rank, const PrefixHash& hash);

  // Returns the blocks of a sequence from the `first`-th on, after `parent`, that hold `tokens`, up
  // to the last that every rank holds, with at most kMostGaps gaps before it; at most
  // floor((N-1)/64), so that at least one token is left to compute. Compares tokens.
  std::vector<StoredLink> Match(const PrefixHash& parent, absl::Span<const int32_t> tokens,
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
