#include "kvstore/page_format.h"

#include <bit>
#include <cstring>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace kvasir::kvstore {

uint64_t PageChecksum(const PageIdentity& identity, absl::Span<const std::byte> page) {
  static_assert(std::endian::native == std::endian::little);
  struct {
    PrefixHash block;
    uint64_t generation;
    uint32_t layer;
    uint32_t head;
  } const place = {identity.block, identity.generation, static_cast<uint32_t>(identity.layer),
                   static_cast<uint32_t>(identity.head)};
  static_assert(sizeof(place) == 48, "hashed as bytes: no padding");
  return XXH3_64bits_withSeed(page.data(), page.size(), XXH3_64bits(&place, sizeof(place)));
}

}  // namespace kvasir::kvstore
