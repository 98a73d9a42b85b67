#include "kvstore/format/page_format.h"

#include <bit>
#include <cstddef>
#include <cstring>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/dtype.h"
#include "kernels/base/status_macros.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace kvasir::kvstore {
namespace {

static_assert(std::endian::native == std::endian::little, "the format is little-endian");

constexpr uint64_t kMagic = 0x544e45545845564b;  // "KVEXTENT"
constexpr uint32_t kVersion = 2;
constexpr uint32_t kByteOrder = 0x01020304;

// Kinds of digests, which are derived data, begin at 16.
enum class SectionKind : uint32_t { kPageChecksums = 1, kPages = 2, kKeyBounds = 16 };
constexpr uint32_t kNumSections = 3;
constexpr size_t kMaxSections = 16;

struct Section {
  uint32_t kind;
  uint32_t zero;
  uint64_t offset;
  uint64_t bytes;
  uint64_t checksum;  // 0 for pages, which have one each
};

// The first 4 KiB of an extent, as they lie in memory.
struct Header {
  uint64_t magic;
  uint32_t version;
  uint32_t byte_order;
  uint64_t extent_bytes;
  uint64_t generation;
  uint32_t dtype;
  uint32_t num_layers;
  uint32_t num_kv_heads;
  uint32_t head_dim;
  uint32_t first_layer;
  uint32_t first_head;
  uint32_t block_tokens;
  uint32_t num_sections;
  uint8_t weights_hash[32];
  char kv_form[64];
  uint8_t block_hash[32];
  int32_t tokens[kBlockTokens];
  Section sections[kMaxSections];
  uint8_t owner[32];
  uint8_t zeros[3096];
  uint64_t checksum;  // XXH3_64bits of everything before it
};
static_assert(sizeof(Header) == kExtentHeaderBytes);
static_assert(offsetof(Header, checksum) == kExtentHeaderBytes - 8);

int64_t AlignUp(int64_t bytes, int64_t alignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

bool HasChecksum(const Section& section) {
  return section.kind != 0 && section.kind != static_cast<uint32_t>(SectionKind::kPages);
}

uint64_t HeaderChecksum(const Header& header) {
  return XXH3_64bits(&header, offsetof(Header, checksum));
}

// Sections are bound to a sealing of their block.
uint64_t SectionChecksum(const PrefixHash& block, uint64_t generation, uint32_t kind,
                         absl::Span<const std::byte> bytes) {
  struct {
    PrefixHash block;
    uint64_t generation;
    uint32_t kind;
    uint32_t ones;
  } const place = {block, generation, kind, 0xffffffff};
  static_assert(sizeof(place) == 48, "hashed as bytes: no padding");
  return XXH3_64bits_withSeed(bytes.data(), bytes.size(), XXH3_64bits(&place, sizeof(place)));
}

PrefixHash BlockHash(const Header& header) {
  PrefixHash hash;
  std::memcpy(hash.data(), header.block_hash, hash.size());
  return hash;
}

// Returns the header of a block without its checksums.
Header MakeHeader(const ExtentFormat& format, const BlockIdentity& block) {
  const KvShard& shard = format.shard();
  const kernels::KvLayout& layout = shard.layout;
  Header header = {};
  header.magic = kMagic;
  header.version = kVersion;
  header.byte_order = kByteOrder;
  header.extent_bytes = static_cast<uint64_t>(format.extent_bytes());
  header.generation = block.generation;
  header.dtype = static_cast<uint32_t>(layout.dtype);
  header.num_layers = static_cast<uint32_t>(layout.num_layers);
  header.num_kv_heads = static_cast<uint32_t>(layout.num_kv_heads);
  header.head_dim = static_cast<uint32_t>(layout.head_dim);
  header.first_layer = static_cast<uint32_t>(shard.first_layer);
  header.first_head = static_cast<uint32_t>(shard.first_head);
  header.block_tokens = static_cast<uint32_t>(kBlockTokens);
  header.num_sections = kNumSections;
  std::memcpy(header.weights_hash, shard.weights_hash.data(), shard.weights_hash.size());
  std::memcpy(header.kv_form, shard.kv_form.data(), shard.kv_form.size());
  std::memcpy(header.block_hash, block.hash.data(), block.hash.size());
  std::memcpy(header.tokens, block.tokens.data(), sizeof(header.tokens));
  std::memcpy(header.owner, block.owner.data(), block.owner.size());
  const auto set = [&](Section& section, SectionKind kind, int64_t offset, int64_t bytes) {
    section = {.kind = static_cast<uint32_t>(kind),
               .zero = 0,
               .offset = static_cast<uint64_t>(offset),
               .bytes = static_cast<uint64_t>(bytes),
               .checksum = 0};
  };
  set(header.sections[0], SectionKind::kPageChecksums, format.checksums_offset(),
      layout.pages_per_block() * static_cast<int64_t>(sizeof(uint64_t)));
  set(header.sections[1], SectionKind::kKeyBounds, format.bounds_offset(),
      layout.block_bounds_bytes());
  set(header.sections[2], SectionKind::kPages, format.pages_offset(), layout.block_bytes());
  return header;
}

absl::Span<const std::byte> SectionBytes(const Section& section,
                                         absl::Span<const std::byte> extent) {
  return extent.subspan(section.offset, section.bytes);
}

std::string Hex(const uint8_t* bytes, size_t size) {
  return absl::BytesToHexString(absl::string_view(reinterpret_cast<const char*>(bytes), size));
}

}  // namespace

uint64_t PageChecksum(const PageIdentity& identity, absl::Span<const std::byte> page) {
  struct {
    PrefixHash block;
    uint32_t layer;
    uint32_t head;
  } const place = {identity.block, static_cast<uint32_t>(identity.layer),
                   static_cast<uint32_t>(identity.head)};
  static_assert(sizeof(place) == 40, "hashed as bytes: no padding");
  return XXH3_64bits_withSeed(page.data(), page.size(), XXH3_64bits(&place, sizeof(place)));
}

absl::StatusOr<ExtentFormat> ExtentFormat::Create(const KvShard& shard) {
  if (shard.weights_hash.size() > sizeof(Header::weights_hash) ||
      shard.kv_form.size() > sizeof(Header::kv_form)) {
    return absl::InvalidArgumentError(
        absl::StrCat("extent format: a weights hash of ", shard.weights_hash.size(),
                     " bytes (at most 32) and a KV form of ", shard.kv_form.size(),
                     " (at most 64) do not fit the header"));
  }
  return ExtentFormat(shard);
}

ExtentFormat::ExtentFormat(const KvShard& shard) : shard_(shard) {
  const kernels::KvLayout& layout = shard_.layout;
  constexpr int64_t kLine = 64;
  bounds_offset_ = AlignUp(
      kExtentHeaderBytes + layout.pages_per_block() * static_cast<int64_t>(sizeof(uint64_t)),
      kLine);
  pages_offset_ = AlignUp(bounds_offset_ + layout.block_bounds_bytes(), kExtentAlignment);
  extent_bytes_ = AlignUp(pages_offset_ + layout.block_bytes(), kExtentAlignment);
}

PageIdentity ExtentFormat::identity(const PrefixHash& block, int64_t page_in_block) const {
  return {.block = block,
          .layer = shard_.first_layer + page_in_block / shard_.layout.num_kv_heads,
          .head = shard_.first_head + page_in_block % shard_.layout.num_kv_heads};
}

void ExtentFormat::WriteHeader(const BlockIdentity& block, absl::Span<std::byte> extent) const {
  KVASIR_CHECK(static_cast<int64_t>(extent.size()) >= pages_offset_);
  Header header = MakeHeader(*this, block);
  for (Section& section : header.sections) {
    if (!HasChecksum(section)) continue;
    section.checksum =
        SectionChecksum(block.hash, block.generation, section.kind, SectionBytes(section, extent));
  }
  header.checksum = HeaderChecksum(header);
  std::memcpy(extent.data(), &header, sizeof(header));
}

bool ExtentFormat::HasHeader(absl::Span<const std::byte> extent) {
  return std::memcmp(extent.data(), &kMagic, sizeof(kMagic)) == 0;
}

PrefixHash ExtentFormat::OwnerOf(absl::Span<const std::byte> extent) {
  PrefixHash owner;
  std::memcpy(owner.data(), extent.data() + offsetof(Header, owner), owner.size());
  return owner;
}

void ExtentFormat::RemoveHeader(absl::Span<std::byte> extent) {
  std::memset(extent.data(), 0, sizeof(kMagic));
}

absl::StatusOr<BlockIdentity> ExtentFormat::ReadHeader(absl::Span<const std::byte> bytes) const {
  Header header;
  if (bytes.size() < sizeof(header)) {
    return absl::DataLossError(absl::StrCat("extent header: ", bytes.size(), " bytes, need 4096"));
  }
  std::memcpy(&header, bytes.data(), sizeof(header));
  if (header.magic != kMagic) return absl::DataLossError("extent header: no magic number");
  if (header.byte_order != kByteOrder || header.version != kVersion) {
    return absl::FailedPreconditionError(absl::StrCat(
        "extent header: version ", header.version, ", byte order ", absl::Hex(header.byte_order),
        "; this build reads version ", kVersion, ", byte order ", absl::Hex(kByteOrder)));
  }
  if (header.checksum != HeaderChecksum(header)) {
    return absl::DataLossError("extent header: wrong checksum");
  }
  BlockIdentity block = {.hash = BlockHash(header), .generation = header.generation};
  std::memcpy(block.tokens.data(), header.tokens, sizeof(header.tokens));
  std::memcpy(block.owner.data(), header.owner, block.owner.size());
  Header expected = MakeHeader(*this, block);
  for (size_t i = 0; i < kMaxSections; ++i) {
    if (HasChecksum(expected.sections[i])) {
      expected.sections[i].checksum = header.sections[i].checksum;
    }
  }
  expected.checksum = header.checksum;
  if (std::memcmp(&expected, &header, sizeof(header)) != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("extent header: KV of another model or shard: weights ",
                     Hex(header.weights_hash, 4), ", ", header.num_layers, " layers from ",
                     header.first_layer, ", ", header.num_kv_heads, " KV heads of dimension ",
                     header.head_dim, " from ", header.first_head, "; expected ", Fingerprint()));
  }
  return block;
}

absl::StatusOr<BlockIdentity> ExtentFormat::ReadSections(absl::Span<const std::byte> extent) const {
  if (static_cast<int64_t>(extent.size()) < pages_offset_) {
    return absl::DataLossError(
        absl::StrCat("extent: ", extent.size(), " bytes, its front has ", pages_offset_));
  }
  KVASIR_ASSIGN_OR_RETURN(const BlockIdentity found, ReadHeader(extent));
  Header header;
  std::memcpy(&header, extent.data(), sizeof(header));
  for (const Section& section : header.sections) {
    if (!HasChecksum(section)) continue;
    if (section.checksum != SectionChecksum(found.hash, found.generation, section.kind,
                                            SectionBytes(section, extent))) {
      return absl::DataLossError(absl::StrCat("extent: wrong checksum of section ", section.kind));
    }
  }
  return found;
}

absl::Status ExtentFormat::VerifyFront(const BlockIdentity& expected,
                                       absl::Span<const std::byte> front) const {
  KVASIR_ASSIGN_OR_RETURN(const BlockIdentity found, ReadSections(front));
  if (found.hash == expected.hash && found.generation == expected.generation &&
      found.tokens == expected.tokens) {
    return absl::OkStatus();
  }
  return absl::DataLossError(absl::StrCat(
      "extent: block ", Hex(found.hash.data(), 4), " of generation ", found.generation,
      ", expected ", Hex(expected.hash.data(), 4), " of generation ", expected.generation));
}

absl::Status ExtentFormat::Verify(const BlockIdentity& expected,
                                  absl::Span<const std::byte> extent) const {
  if (static_cast<int64_t>(extent.size()) != extent_bytes_) {
    return absl::DataLossError(
        absl::StrCat("extent: ", extent.size(), " bytes, expected ", extent_bytes_));
  }
  KVASIR_RETURN_IF_ERROR(VerifyFront(expected, extent));
  const size_t page_bytes = static_cast<size_t>(shard_.layout.page_bytes());
  for (int64_t i = 0; i < shard_.layout.pages_per_block(); ++i) {
    uint64_t checksum = 0;
    std::memcpy(&checksum, extent.data() + checksums_offset() + i * 8, sizeof(checksum));
    const PageIdentity place = identity(expected.hash, i);
    if (checksum !=
        PageChecksum(place, extent.subspan(static_cast<size_t>(page_offset(i)), page_bytes))) {
      return absl::DataLossError(absl::StrCat("extent: wrong checksum of the page of layer ",
                                              place.layer, ", KV head ", place.head));
    }
  }
  return absl::OkStatus();
}

std::string ExtentFormat::Fingerprint() const {
  const kernels::KvLayout& layout = shard_.layout;
  return absl::StrCat(FingerprintBeforeHeads(), layout.num_kv_heads, " KV heads of dimension ",
                      layout.head_dim, " from ", shard_.first_head);
}

std::string ExtentFormat::FingerprintOfAnyHeads() const {
  return absl::StrCat(FingerprintBeforeHeads(), "KV heads of dimension ", shard_.layout.head_dim);
}

std::string ExtentFormat::FingerprintBeforeHeads() const {
  const kernels::KvLayout& layout = shard_.layout;
  return absl::StrCat("version ", kVersion, ", weights ",
                      absl::BytesToHexString(shard_.weights_hash), ", ", shard_.kv_form, ", ",
                      kernels::DTypeName(layout.dtype), ", ", layout.num_layers, " layers from ",
                      shard_.first_layer, ", ");
}

}  // namespace kvasir::kvstore
