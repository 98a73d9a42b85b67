// Blocks whose pages and bounds follow from their names, the same on the ranks of every degree.
#pragma once

#include <cstdint>
#include <cstring>
#include <random>

#include "absl/types/span.h"

#include "kvstore/format/extent_memory.h"
#include "kvstore/format/page_format.h"
#include "tests/kvstore/test_blocks.h"

namespace kvasir::kvstore {

// The extents of a rank that holds `count` of the model's 4 KV heads, from `first` on.
inline ExtentFormat RankFormat(int64_t first, int64_t count) {
  KvShard shard = SmallShard();
  shard.layout.num_kv_heads = count;
  shard.first_head = first;
  return ExtentFormat::Create(shard).value();
}

struct NamedBlock {
  NamedBlock(const ExtentFormat& format, uint32_t name, uint64_t generation)
      : memory(ExtentMemory::Allocate(1, format.extent_bytes()).value()), extent(memory[0]) {
    const KvShard& shard = format.shard();
    identity = {.hash = HashOf(name), .generation = generation, .tokens = TokensOf(name)};
    for (int64_t page = 0; page < shard.layout.pages_per_block(); ++page) {
      const PageIdentity place = format.identity(identity.hash, page);
      std::mt19937 rng(static_cast<uint32_t>((name * 100 + place.layer) * 100 + place.head));
      const auto fill = [&](int64_t offset, int64_t bytes) {
        const auto part = extent.subspan(static_cast<size_t>(offset), static_cast<size_t>(bytes));
        for (std::byte& byte : part) byte = static_cast<std::byte>(rng());
        return part;
      };
      fill(format.bounds_offset() + page * shard.layout.page_bounds_bytes(),
           shard.layout.page_bounds_bytes());
      const uint64_t checksum =
          PageChecksum(place, fill(format.page_offset(page), shard.layout.page_bytes()));
      std::memcpy(extent.data() + format.checksums_offset() + page * 8, &checksum, 8);
    }
    format.WriteHeader(identity, extent);
  }

  ExtentMemory memory;
  absl::Span<std::byte> extent;
  BlockIdentity identity;
};

}  // namespace kvasir::kvstore
