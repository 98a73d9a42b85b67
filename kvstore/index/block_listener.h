// Hears which token blocks of a prefix index can be found: the cache as a router outside sees it.
// Called by the index on the scheduler's thread, so that implementations must not block.
#pragma once

#include <cstdint>

#include "absl/types/span.h"

#include "kvstore/format/block.h"

namespace kvasir::kvstore {

class BlockListener {
 public:
  virtual ~BlockListener() = default;
  // Match finds the block from now on. `parent`: the chain value before it, null for the first
  // block of a prompt.
  virtual void Stored(const PrefixHash& hash, const PrefixHash* parent,
                      absl::Span<const int32_t> tokens) = 0;
  // Match does not find the block any more, nor one that continues it; those are told as well.
  virtual void Removed(const PrefixHash& hash) = 0;
  // The index is gone, and all its blocks with it.
  virtual void Cleared() = 0;
};

}  // namespace kvasir::kvstore
