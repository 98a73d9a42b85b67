// The lean blocks of a KV store: sealed blocks whose pages lie on disk only. What is needed without
// a read stays in memory: the front of their extents (header, page checksums, key bounds), and key
// codes in the residency's tables. It holds their extents on disk, and makes their pages readable
// through a page cache. The store decides which blocks are lean. Thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "kvstore/format/extent_memory.h"
#include "kvstore/on_demand/page_cache.h"
#include "kvstore/tiers/tier.h"

namespace kvasir::kvstore {

// Numbers of the lean blocks of a store, as indices in the residency's tables: they follow those of
// the host tier's extents.
struct LeanRange {
  int64_t begin = 0;
  int64_t count = 0;

  bool contains(int64_t extent) const { return extent >= begin; }
};

class LeanBlocks {
 public:
  // The tier outlives them. Errors are those of PageCache::Create.
  static absl::StatusOr<std::unique_ptr<LeanBlocks>> Create(const PageCache::Options& options,
                                                            Tier& below);

  const LeanRange& range() const { return range_; }
  int64_t num_used() const { return range_.count - std::ssize(free_); }
  PageCache& cache() { return *cache_; }
  const PageCache& cache() const { return *cache_; }

  // Returns a block that holds the extent; its pages cannot be read yet. REQUIRES: num_used() is
  // less than their number.
  int64_t Take(std::unique_ptr<HeldExtent> held);
  // Memory for the front of its extent.
  absl::Span<std::byte> front(int64_t extent) const {
    return fronts_[static_cast<size_t>(extent - range_.begin)];
  }
  // Memory for the key bounds of every block.
  std::vector<std::byte*> all_bounds() const;
  // Makes the pages readable. REQUIRES: the front is in place.
  void Show(int64_t extent, const PrefixHash& hash);
  // Nothing of it stays in memory.
  void Free(int64_t extent);

 private:
  LeanBlocks(const PageCache::Options& options, ExtentMemory fronts,
             std::unique_ptr<PageCache> cache);

  const LeanRange range_;
  const int64_t bounds_offset_;
  const ExtentMemory fronts_;
  std::vector<std::unique_ptr<HeldExtent>> held_;
  std::vector<int64_t> free_;
  const std::unique_ptr<PageCache> cache_;  // destroyed first: it reads what is held
};

}  // namespace kvasir::kvstore
