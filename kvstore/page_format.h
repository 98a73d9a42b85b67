// What binds the bytes of a page to the place they belong to. The checksum of a page is XXH3-64
// seeded with the page's identity, so a page that is intact but stale or in the wrong place fails
// like a damaged one. Called by the tiers. Thread-safe: functions only.
//
//   seed     = XXH3_64bits(block hash [32] . generation [8] . layer [4] . head [4]), little-endian
//   checksum = XXH3_64bits_withSeed(page, seed)
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"

#include "kvstore/block.h"

namespace kvasir::kvstore {

struct PageIdentity {
  const PrefixHash& block;
  uint64_t generation = 0;  // of the block: which time it was sealed
  int64_t layer = 0;        // of the model, not of the rank
  int64_t head = 0;         // KV head of the model, not of the rank
};

uint64_t PageChecksum(const PageIdentity& identity, absl::Span<const std::byte> page);

}  // namespace kvasir::kvstore
