#include "kvstore/format/head_extent.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"

namespace kvasir::kvstore {

HeadRange Common(const HeadRange& a, const HeadRange& b) {
  const int64_t first = std::max(a.first, b.first);
  return {.first = first, .count = std::max<int64_t>(std::min(a.end(), b.end()) - first, 0)};
}

KvShard ShardOfHeads(const KvShard& shard, const HeadRange& heads) {
  KvShard of_heads = shard;
  of_heads.layout.num_kv_heads = heads.count;
  of_heads.first_head = heads.first;
  return of_heads;
}

absl::StatusOr<HeadExtent> HeadExtent::Create(const ExtentFormat& rank, const HeadRange& heads) {
  const KvShard& shard = rank.shard();
  if (heads.count < 1 || Common(heads, HeadsOf(shard)) != heads) {
    return absl::InvalidArgumentError(
        absl::StrCat("extent of ", heads.count, " KV heads from ", heads.first, ": the rank holds ",
                     shard.layout.num_kv_heads, " KV heads from ", shard.first_head));
  }
  KVASIR_ASSIGN_OR_RETURN(const ExtentFormat format,
                          ExtentFormat::Create(ShardOfHeads(shard, heads)));
  return HeadExtent(rank, format);
}

// The pages of a layer's neighbouring heads lie side by side in both, and so does what is by page.
void HeadExtent::ForEachPartOfFront(VisitPart visit) const {
  constexpr auto kChecksumBytes = static_cast<int64_t>(sizeof(uint64_t));
  const kernels::KvLayout& layout = rank_.shard().layout;
  const int64_t count = heads_.shard().layout.num_kv_heads;
  const int64_t head = heads_.shard().first_head - rank_.shard().first_head;
  for (int64_t layer = 0; layer < layout.num_layers; ++layer) {
    const int64_t page = layout.page_in_block(layer, head);
    const int64_t to = layer * count;
    visit(rank_.checksums_offset() + page * kChecksumBytes,
          heads_.checksums_offset() + to * kChecksumBytes, count * kChecksumBytes);
    visit(rank_.bounds_offset() + page * layout.page_bounds_bytes(),
          heads_.bounds_offset() + to * layout.page_bounds_bytes(),
          count * layout.page_bounds_bytes());
  }
}

void HeadExtent::ForEachPart(VisitPart visit) const {
  ForEachPartOfFront(visit);
  const kernels::KvLayout& layout = rank_.shard().layout;
  const int64_t count = heads_.shard().layout.num_kv_heads;
  const int64_t head = heads_.shard().first_head - rank_.shard().first_head;
  for (int64_t layer = 0; layer < layout.num_layers; ++layer) {
    visit(rank_.page_offset(layout.page_in_block(layer, head)), heads_.page_offset(layer * count),
          count * layout.page_bytes());
  }
}

void HeadExtent::Gather(const BlockIdentity& block, absl::Span<const std::byte> rank_extent,
                        absl::Span<std::byte> heads_extent) const {
  // The gaps leave the process with the rest.
  const int64_t pages_end = heads_.page_offset(heads_.shard().layout.pages_per_block());
  const auto zero = [&](int64_t begin, int64_t end) {
    std::memset(heads_extent.data() + begin, 0, static_cast<size_t>(end - begin));
  };
  zero(heads_.checksums_offset(), heads_.pages_offset());
  zero(pages_end, heads_.extent_bytes());
  ForEachPart([&](int64_t from, int64_t to, int64_t bytes) {
    std::memcpy(heads_extent.data() + to, rank_extent.data() + from, static_cast<size_t>(bytes));
  });
  heads_.WriteHeader(block, heads_extent);
}

void HeadExtent::Scatter(absl::Span<const std::byte> heads_extent,
                         absl::Span<std::byte> rank_extent) const {
  ForEachPart([&](int64_t to, int64_t from, int64_t bytes) {
    std::memcpy(rank_extent.data() + to, heads_extent.data() + from, static_cast<size_t>(bytes));
  });
}

void HeadExtent::ScatterFront(absl::Span<const std::byte> heads_front,
                              absl::Span<std::byte> rank_front) const {
  ForEachPartOfFront([&](int64_t to, int64_t from, int64_t bytes) {
    std::memcpy(rank_front.data() + to, heads_front.data() + from, static_cast<size_t>(bytes));
  });
}

}  // namespace kvasir::kvstore
