// The form in which a token block leaves the process: an extent, the same bytes in the host tier
// and on disk (docs/page_format.md is the grammar). Its contents are bound to the place that they
// belong to, so that bytes that are intact but stale, misdirected or of another model fail like
// damaged ones. It hides field offsets. Called by the tiers. Thread-safe: const functions only.
//
//   extent: [header 4 KiB][checksum of each page][key bounds of each page] 4 KiB-aligned [pages]
//
//   seed     = XXH3_64bits(block hash [32] . layer [4] . head [4]), little-endian
//   checksum = XXH3_64bits_withSeed(page, seed)
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#include "kernels/paged/paged_kv.h"
#include "kvstore/format/block.h"

namespace kvasir::kvstore {

// Unit of disk I/O: headers, pages sections and extents are multiples of it and aligned to it.
inline constexpr int64_t kExtentAlignment = 4096;
inline constexpr int64_t kExtentHeaderBytes = 4096;

// Identity of the KV of some heads, those of a rank or of a store: blocks of different shards never
// mix.
struct KvShard {
  kernels::KvLayout layout;
  std::string weights_hash = {};  // at most 32 bytes
  std::string kv_form = {};       // "rotated/bfloat16", "unrotated..."; at most 64 bytes
  int64_t first_layer = 0;        // of the shard, in the model
  int64_t first_head = 0;         // KV head
};

// Identity of a full block.
struct BlockIdentity {
  PrefixHash hash{};
  uint64_t generation = 0;  // number of this sealing; no two sealings of a store are equal
  std::array<int32_t, kBlockTokens> tokens{};
  PrefixHash owner{};  // HashOwner of the tenant; zeros: not known, as releases before it wrote
};

// Name of a page, the same on every rank of every degree.
struct PageIdentity {
  const PrefixHash& block;
  int64_t layer = 0;  // of the model, not of the rank
  int64_t head = 0;   // KV head of the model, not of the rank
};

uint64_t PageChecksum(const PageIdentity& identity, absl::Span<const std::byte> page);

class ExtentFormat {
 public:
  // INVALID_ARGUMENT when names are too long for the header.
  static absl::StatusOr<ExtentFormat> Create(const KvShard& shard);

  int64_t checksums_offset() const { return kExtentHeaderBytes; }
  int64_t bounds_offset() const { return bounds_offset_; }
  int64_t pages_offset() const { return pages_offset_; }
  int64_t page_offset(int64_t page_in_block) const {
    return pages_offset_ + page_in_block * shard_.layout.page_bytes();
  }
  int64_t extent_bytes() const { return extent_bytes_; }
  const KvShard& shard() const { return shard_; }
  PageIdentity identity(const PrefixHash& block, int64_t page_in_block) const;

  // Completes an extent whose page checksums and bounds are in place, or only its front.
  void WriteHeader(const BlockIdentity& block, absl::Span<std::byte> extent) const;
  // Whether an extent begins like a header, sound or not; and makes it one that does not.
  static bool HasHeader(absl::Span<const std::byte> extent);
  // The owner in a sound header.
  static PrefixHash OwnerOf(absl::Span<const std::byte> extent);
  static void RemoveHeader(absl::Span<std::byte> extent);
  // Reads the first 4 KiB of an extent. DATA_LOSS when they are damaged or no header,
  // FAILED_PRECONDITION when they belong to another version, byte order, model, shard or shape.
  absl::StatusOr<BlockIdentity> ReadHeader(absl::Span<const std::byte> header) const;
  // As ReadHeader, and DATA_LOSS when page checksums or bounds are not as written. Pages are not
  // looked at: the extent's front is enough, the pages_offset() bytes before them.
  absl::StatusOr<BlockIdentity> ReadSections(absl::Span<const std::byte> extent) const;
  // OK when the extent is the block's and every byte that can be read from it is as written. Errors
  // are those of ReadHeader, and DATA_LOSS for another block or generation.
  absl::Status Verify(const BlockIdentity& expected, absl::Span<const std::byte> extent) const;
  // The same of an extent's front.
  absl::Status VerifyFront(const BlockIdentity& expected, absl::Span<const std::byte> front) const;

  // Names version, model, shard and shape. Stores with equal fingerprints can read each other's
  // extents.
  std::string Fingerprint() const;
  // The same without the heads: equal for the ranks of all degrees.
  std::string FingerprintOfAnyHeads() const;

 private:
  explicit ExtentFormat(const KvShard& shard);
  std::string FingerprintBeforeHeads() const;

  KvShard shard_;
  int64_t bounds_offset_ = 0;
  int64_t pages_offset_ = 0;
  int64_t extent_bytes_ = 0;
};

}  // namespace kvasir::kvstore
