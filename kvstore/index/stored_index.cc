#include "kvstore/index/stored_index.h"

#include <algorithm>

#include "kernels/base/status_macros.h"

namespace kvasir::kvstore {
void StoredIndex::Stored(int64_t rank, const PrefixHash& hash, absl::Span<const int32_t> tokens) {
  KVASIR_CHECK(rank >= 0 && rank < num_ranks_ &&
               tokens.size() == static_cast<size_t>(kBlockTokens));
  Record& record = records_[hash];
  if (record.num_holders > 0 && tokens != absl::MakeConstSpan(record.tokens)) {
    ++hash_collisions_;
    if (record.num_holders == num_ranks_) --held_by_all_;
    record = Record();
  }
  if (record.num_holders == 0) {
    std::copy(tokens.begin(), tokens.end(), record.tokens.begin());
    record.holders.resize(static_cast<size_t>(num_ranks_));
  }
  if (record.holders[static_cast<size_t>(rank)]) return;
  record.holders[static_cast<size_t>(rank)] = true;
  if (++record.num_holders == num_ranks_) ++held_by_all_;
}

void StoredIndex::Forgotten(int64_t rank, const PrefixHash& hash) {
  KVASIR_CHECK(rank >= 0 && rank < num_ranks_);
  const auto it = records_.find(hash);
  if (it == records_.end() || !it->second.holders[static_cast<size_t>(rank)]) return;
  it->second.holders[static_cast<size_t>(rank)] = false;
  if (it->second.num_holders-- == num_ranks_) --held_by_all_;
  if (it->second.num_holders == 0) records_.erase(it);
}

std::vector<StoredLink> StoredIndex::Match(const PrefixHash& parent,
                                           absl::Span<const int32_t> tokens, int64_t first,
                                           const DecodePart& decode) {
  std::vector<StoredLink> links;
  if (held_by_all_ == 0) return links;
  const int64_t limit = (static_cast<int64_t>(tokens.size()) - 1) / kBlockTokens;
  size_t last_held = 0;  // number of links up to it
  int64_t gaps = 0;
  for (int64_t i = 0; i < limit; ++i) {
    const auto block_tokens =
        tokens.subspan(static_cast<size_t>(i * kBlockTokens), static_cast<size_t>(kBlockTokens));
    const PrefixHash hash =
        hasher_(links.empty() ? parent : links.back().hash, block_tokens, decode.KeyOf(first + i));
    links.push_back({.hash = hash, .held = HeldByAll(hash)});
    if (!links.back().held) {
      if (std::ssize(links) - static_cast<int64_t>(last_held) == kMostMissing) break;
      continue;
    }
    if (block_tokens != absl::MakeConstSpan(records_.at(hash).tokens)) {
      ++hash_collisions_;
      break;
    }
    if (last_held + 1 < links.size() && ++gaps > kMostGaps) break;
    last_held = links.size();
  }
  links.resize(last_held);
  return links;
}

bool StoredIndex::HeldByAll(const PrefixHash& hash) const {
  const auto it = records_.find(hash);
  return it != records_.end() && it->second.num_holders == num_ranks_;
}

StoredIndexStats StoredIndex::stats() const {
  return {.blocks = held_by_all_,
          .partly_held = static_cast<int64_t>(records_.size()) - held_by_all_,
          .hash_collisions = hash_collisions_};
}

}  // namespace kvasir::kvstore
