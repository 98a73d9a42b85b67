// The part of an extent that belongs to one KV head, or to several in a row, as an extent of its
// own: what a store on disk holds, and what peers of other degrees give each other. It hides where
// these heads' pages lie among those of others. Called by the disk tier and by peers. Thread-safe:
// const functions only.
//
//   rank's extent    [header][checksums][bounds][pages: layer 0 of heads 0 1 2, layer 1 of ...]
//   heads' extent    [header][checksums][bounds][pages: layer 0 of heads 1 2, layer 1 of ...]
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "kvstore/format/page_format.h"

namespace kvasir::kvstore {

// Some of the model's KV heads, in a row.
struct HeadRange {
  int64_t first = 0;
  int64_t count = 0;

  int64_t end() const { return first + count; }
  bool operator==(const HeadRange&) const = default;
};

inline HeadRange HeadsOf(const KvShard& shard) {
  return {.first = shard.first_head, .count = shard.layout.num_kv_heads};
}
// Returns the heads that are in both; `count` 0: none.
HeadRange Common(const HeadRange& a, const HeadRange& b);

// Returns the shard that holds some of the shard's heads.
KvShard ShardOfHeads(const KvShard& shard, const HeadRange& heads);

class HeadExtent {
 public:
  // INVALID_ARGUMENT when some of the heads are none of the extents', or there are none.
  static absl::StatusOr<HeadExtent> Create(const ExtentFormat& rank, const HeadRange& heads);

  const ExtentFormat& format() const { return heads_; }

  // Makes the heads' extent of a rank's whose pages, bounds and page checksums are in place.
  // Nothing is left of what was there.
  void Gather(const BlockIdentity& block, absl::Span<const std::byte> rank_extent,
              absl::Span<std::byte> heads_extent) const;
  // Puts the pages, bounds and page checksums of the heads' extent into their places in the rank's
  // and leaves everything else of that as it is. Different heads may do so on different threads.
  void Scatter(absl::Span<const std::byte> heads_extent, absl::Span<std::byte> rank_extent) const;
  // The same without the pages: both are fronts of extents (page_format.h).
  void ScatterFront(absl::Span<const std::byte> heads_front,
                    absl::Span<std::byte> rank_front) const;

 private:
  // Called with an offset in the rank's extent, one in the heads', and a number of bytes.
  using VisitPart = absl::FunctionRef<void(int64_t, int64_t, int64_t)>;

  HeadExtent(const ExtentFormat& rank, const ExtentFormat& heads) : rank_(rank), heads_(heads) {}

  void ForEachPartOfFront(VisitPart visit) const;
  void ForEachPart(VisitPart visit) const;

  ExtentFormat rank_;
  ExtentFormat heads_;
};

}  // namespace kvasir::kvstore
