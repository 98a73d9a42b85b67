// One KV head's part of an extent, as an extent of its own: what a store on disk holds, whatever
// the degree of the service. It hides where the head's pages lie among those of others. Called by
// the disk tier. Thread-safe: const functions only.
//
//   rank's extent   [header][checksums][bounds][pages: layer 0 of heads 0 1 2, layer 1 of heads
//   ...] head's extent   [header][checksums][bounds][pages: layer 0, layer 1, ... of the head]
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "kvstore/format/page_format.h"

namespace kvasir::kvstore {

// Returns the shard that holds one of the shard's heads. `head` is of the model.
KvShard ShardOfHead(const KvShard& shard, int64_t head);

class HeadExtent {
 public:
  // `head` is of the model. INVALID_ARGUMENT when it is none of the extents' heads.
  static absl::StatusOr<HeadExtent> Create(const ExtentFormat& rank, int64_t head);

  const ExtentFormat& format() const { return head_; }

  // Makes the head's extent of a rank's whose pages, bounds and page checksums are in place.
  void Gather(const BlockIdentity& block, absl::Span<const std::byte> rank_extent,
              absl::Span<std::byte> head_extent) const;
  // Puts the pages, bounds and page checksums of the head's extent into their places in the rank's
  // and leaves everything else of that as it is. Different heads may do so on different threads.
  void Scatter(absl::Span<const std::byte> head_extent, absl::Span<std::byte> rank_extent) const;

 private:
  HeadExtent(const ExtentFormat& rank, const ExtentFormat& head) : rank_(rank), head_(head) {}

  // Calls visit(offset in the rank's extent, offset in the head's, bytes) for every part.
  void ForEachPart(absl::FunctionRef<void(int64_t, int64_t, int64_t)> visit) const;

  ExtentFormat rank_;
  ExtentFormat head_;
};

}  // namespace kvasir::kvstore
