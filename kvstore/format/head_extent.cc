#include "kvstore/format/head_extent.h"

#include <cstring>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"

namespace kvasir::kvstore {

KvShard ShardOfHead(const KvShard& shard, int64_t head) {
  KvShard of_head = shard;
  of_head.layout.num_kv_heads = 1;
  of_head.first_head = head;
  return of_head;
}

absl::StatusOr<HeadExtent> HeadExtent::Create(const ExtentFormat& rank, int64_t head) {
  const KvShard& shard = rank.shard();
  if (head < shard.first_head || head >= shard.first_head + shard.layout.num_kv_heads) {
    return absl::InvalidArgumentError(absl::StrCat("extent of KV head ", head, ": the rank holds ",
                                                   shard.layout.num_kv_heads, " KV heads from ",
                                                   shard.first_head));
  }
  KVASIR_ASSIGN_OR_RETURN(const ExtentFormat format,
                          ExtentFormat::Create(ShardOfHead(shard, head)));
  return HeadExtent(rank, format);
}

void HeadExtent::ForEachPart(absl::FunctionRef<void(int64_t, int64_t, int64_t)> visit) const {
  constexpr auto kChecksumBytes = static_cast<int64_t>(sizeof(uint64_t));
  const kernels::KvLayout& layout = rank_.shard().layout;
  const int64_t head = head_.shard().first_head - rank_.shard().first_head;
  for (int64_t layer = 0; layer < layout.num_layers; ++layer) {
    const int64_t page = layout.page_in_block(layer, head);
    visit(rank_.checksums_offset() + page * kChecksumBytes,
          head_.checksums_offset() + layer * kChecksumBytes, kChecksumBytes);
    visit(rank_.bounds_offset() + page * layout.page_bounds_bytes(),
          head_.bounds_offset() + layer * layout.page_bounds_bytes(), layout.page_bounds_bytes());
    visit(rank_.page_offset(page), head_.page_offset(layer), layout.page_bytes());
  }
}

void HeadExtent::Gather(const BlockIdentity& block, absl::Span<const std::byte> rank_extent,
                        absl::Span<std::byte> head_extent) const {
  ForEachPart([&](int64_t from, int64_t to, int64_t bytes) {
    std::memcpy(head_extent.data() + to, rank_extent.data() + from, static_cast<size_t>(bytes));
  });
  head_.WriteHeader(block, head_extent);
}

void HeadExtent::Scatter(absl::Span<const std::byte> head_extent,
                         absl::Span<std::byte> rank_extent) const {
  ForEachPart([&](int64_t to, int64_t from, int64_t bytes) {
    std::memcpy(rank_extent.data() + to, head_extent.data() + from, static_cast<size_t>(bytes));
  });
}

}  // namespace kvasir::kvstore
