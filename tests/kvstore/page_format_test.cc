#include "kvstore/format/page_format.h"

#include <cstring>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "tests/support/iterations.h"

namespace kvasir::kvstore {
namespace {

using ::testing::HasSubstr;

constexpr kernels::KvLayout kLayout = {
    .num_layers = 2, .num_kv_heads = 2, .head_dim = 2, .dtype = kernels::DType::kBFloat16};

KvShard Shard() {
  return {.layout = kLayout,
          .weights_hash = std::string(32, 'w'),
          .kv_form = "rotated/bfloat16",
          .first_layer = 4,
          .first_head = 2};
}

BlockIdentity MakeBlock(uint8_t name, uint64_t generation) {
  BlockIdentity block = {.hash = {}, .generation = generation, .tokens = {}};
  block.hash.fill(name);
  block.tokens.fill(name * 1000);
  return block;
}

// A whole extent with random pages and bounds.
std::vector<std::byte> MakeExtent(const ExtentFormat& format, const BlockIdentity& block,
                                  uint32_t seed) {
  std::mt19937 rng(seed);
  std::vector<std::byte> extent(static_cast<size_t>(format.extent_bytes()));
  for (std::byte& byte : extent) byte = static_cast<std::byte>(rng());
  for (int64_t i = 0; i < kLayout.pages_per_block(); ++i) {
    const uint64_t checksum = PageChecksum(
        format.identity(block.hash, i),
        absl::MakeConstSpan(extent).subspan(static_cast<size_t>(format.page_offset(i)),
                                            static_cast<size_t>(kLayout.page_bytes())));
    std::memcpy(extent.data() + format.checksums_offset() + i * 8, &checksum, sizeof(checksum));
  }
  format.WriteHeader(block, absl::MakeSpan(extent));
  return extent;
}

TEST(PageChecksum, DependsOnEveryPartOfTheIdentity) {
  const std::vector<std::byte> page(4096, std::byte{17});
  PrefixHash block{};
  std::set<uint64_t> seen;
  const auto add = [&](const PrefixHash& hash, int64_t layer, int64_t head) {
    seen.insert(PageChecksum({.block = hash, .layer = layer, .head = head}, page));
  };
  for (int64_t layer = 0; layer < 30; ++layer) {
    for (int64_t head = 0; head < 30; ++head) add(block, layer, head);
  }
  EXPECT_EQ(seen.size(), 900u);
  for (size_t bit = 0; bit < 256; ++bit) {
    PrefixHash other = block;
    other[bit / 8] = static_cast<uint8_t>(1 << (bit % 8));
    add(other, 0, 0);
  }
  EXPECT_EQ(seen.size(), 1156u);
}

TEST(ExtentFormat, PartsFollowEachOtherAlignedAndWithoutOverlap) {
  const ExtentFormat format = ExtentFormat::Create(Shard()).value();
  EXPECT_EQ(format.checksums_offset(), 4096);
  EXPECT_EQ(format.bounds_offset(), 4096 + 64);
  EXPECT_EQ(format.pages_offset(), 8192);
  EXPECT_EQ(format.page_offset(3), 8192 + 3 * 512);
  EXPECT_EQ(format.extent_bytes(), 12288);
  // The 8B shape of docs/page_format.md.
  KvShard large = Shard();
  large.layout = {
      .num_layers = 32, .num_kv_heads = 8, .head_dim = 128, .dtype = kernels::DType::kBFloat16};
  const ExtentFormat example = ExtentFormat::Create(large).value();
  EXPECT_EQ(example.bounds_offset(), 6144);
  EXPECT_EQ(example.pages_offset(), 139264);
  EXPECT_EQ(example.extent_bytes(), 8527872);
}

TEST(ExtentFormat, ReadsBackWhatWasWritten) {
  const ExtentFormat format = ExtentFormat::Create(Shard()).value();
  const BlockIdentity block = MakeBlock(3, 77);
  const std::vector<std::byte> extent = MakeExtent(format, block, 1);
  EXPECT_TRUE(format.Verify(block, extent).ok()) << format.Verify(block, extent);
  const BlockIdentity found =
      format.ReadHeader(absl::MakeConstSpan(extent).first(kExtentHeaderBytes)).value();
  EXPECT_EQ(found.hash, block.hash);
  EXPECT_EQ(found.generation, block.generation);
  EXPECT_EQ(found.tokens, block.tokens);
}

// Silent corruption (one bit, anywhere) is found, except in the padding that nobody reads.
TEST(ExtentFormat, FindsEverySingleBitFlip) {
  const ExtentFormat format = ExtentFormat::Create(Shard()).value();
  const BlockIdentity block = MakeBlock(3, 77);
  std::vector<std::byte> extent = MakeExtent(format, block, 2);
  const auto is_padding = [&](int64_t at) {
    return (at >= format.checksums_offset() + kLayout.pages_per_block() * 8 &&
            at < format.bounds_offset()) ||
           (at >= format.bounds_offset() + kLayout.block_bounds_bytes() &&
            at < format.pages_offset()) ||
           at >= format.pages_offset() + kLayout.block_bytes();
  };
  std::mt19937 rng(3);
  const int64_t flips = testing::Iterations(1000000);
  for (int64_t i = 0; i < flips;) {
    const size_t bit = rng() % (extent.size() * 8);
    if (is_padding(static_cast<int64_t>(bit / 8))) continue;
    ++i;
    const std::byte flip = static_cast<std::byte>(1 << (bit % 8));
    extent[bit / 8] ^= flip;
    ASSERT_FALSE(format.Verify(block, extent).ok()) << "bit " << bit;
    extent[bit / 8] ^= flip;
  }
  EXPECT_TRUE(format.Verify(block, extent).ok());
}

// Misdirected and stale bytes, each of them intact.
TEST(ExtentFormat, FindsPagesAndSectionsThatBelongElsewhere) {
  const ExtentFormat format = ExtentFormat::Create(Shard()).value();
  const BlockIdentity block = MakeBlock(3, 77);
  const std::vector<std::byte> extent = MakeExtent(format, block, 4);
  const auto page = [&](std::vector<std::byte>& of, int64_t i) {
    return of.data() + format.page_offset(i);
  };
  const size_t page_bytes = static_cast<size_t>(kLayout.page_bytes());
  const size_t bounds_bytes = static_cast<size_t>(kLayout.block_bounds_bytes());

  for (int64_t i = 0; i < 4; ++i) {
    for (int64_t j = 0; j < i; ++j) {  // with their checksums: only the place is wrong
      std::vector<std::byte> swapped = extent;
      std::swap_ranges(page(swapped, i), page(swapped, i) + page_bytes, page(swapped, j));
      std::byte* sums = swapped.data() + format.checksums_offset();
      std::swap_ranges(sums + 8 * i, sums + 8 * i + 8, sums + 8 * j);
      format.WriteHeader(block, absl::MakeSpan(swapped));
      EXPECT_FALSE(format.Verify(block, swapped).ok()) << i << " and " << j;
    }
  }
  // The same block sealed another time, and another block.
  for (const BlockIdentity& other : {MakeBlock(3, 76), MakeBlock(4, 77)}) {
    const std::vector<std::byte> foreign = MakeExtent(format, other, 5);
    EXPECT_FALSE(format.Verify(block, foreign).ok());
    std::vector<std::byte> mixed = extent;  // its bounds with our pages: digest and KV disagree
    std::memcpy(mixed.data() + format.bounds_offset(), foreign.data() + format.bounds_offset(),
                bounds_bytes);
    EXPECT_FALSE(format.Verify(block, mixed).ok());
    mixed = foreign;  // our header with its pages
    std::memcpy(mixed.data(), extent.data(), kExtentHeaderBytes);
    EXPECT_FALSE(format.Verify(block, mixed).ok());
    // One of its pages, with its checksum: as good as ours where the block, and so the page, has
    // the same name.
    mixed = extent;
    std::memcpy(page(mixed, 1), foreign.data() + format.page_offset(1), page_bytes);
    std::memcpy(mixed.data() + format.checksums_offset() + 8,
                foreign.data() + format.checksums_offset() + 8, 8);
    format.WriteHeader(block, absl::MakeSpan(mixed));
    EXPECT_EQ(format.Verify(block, mixed).ok(), other.hash == block.hash);
  }
  BlockIdentity other_tokens = block;
  other_tokens.tokens[63] ^= 1;
  EXPECT_FALSE(format.Verify(other_tokens, extent).ok());
}

TEST(ExtentFormat, RefusesExtentsOfOtherModelsShardsShapesVersionsAndByteOrders) {
  const ExtentFormat format = ExtentFormat::Create(Shard()).value();
  const BlockIdentity block = MakeBlock(3, 77);
  std::vector<KvShard> others(8, Shard());
  others[0].weights_hash[31] = 'x';
  others[1].kv_form = "unrotated/bfloat16";
  others[2].first_layer = 5;
  others[3].first_head = 0;
  others[4].layout.dtype = kernels::DType::kFloat16;
  others[5].layout.num_layers = 4;
  others[5].layout.num_kv_heads = 1;
  others[6].layout.head_dim = 4;
  others[7].layout.num_layers = 1;
  std::set<std::string> fingerprints = {format.Fingerprint()};
  for (const KvShard& other : others) {
    const ExtentFormat other_format = ExtentFormat::Create(other).value();
    const std::vector<std::byte> extent = MakeExtent(format, block, 6);
    EXPECT_EQ(other_format.ReadHeader(extent).status().code(),
              absl::StatusCode::kFailedPrecondition)
        << other_format.Fingerprint();
    EXPECT_TRUE(fingerprints.insert(other_format.Fingerprint()).second);
  }
  std::vector<std::byte> extent = MakeExtent(format, block, 6);
  extent[8] = std::byte{1};
  EXPECT_THAT(std::string(format.ReadHeader(extent).status().message()), HasSubstr("version 1"));
  extent[8] = std::byte{2};
  std::swap(extent[12], extent[15]);
  std::swap(extent[13], extent[14]);
  EXPECT_THAT(std::string(format.ReadHeader(extent).status().message()),
              HasSubstr("byte order 4030201"));
}

TEST(ExtentFormat, ShortAndEmptyInputIsDataLoss) {
  const ExtentFormat format = ExtentFormat::Create(Shard()).value();
  const BlockIdentity block = MakeBlock(3, 77);
  const std::vector<std::byte> extent = MakeExtent(format, block, 7);
  for (const size_t bytes : {0u, 1u, 4095u, 4096u, 8192u, 12287u}) {
    EXPECT_EQ(format.Verify(block, absl::MakeConstSpan(extent).first(bytes)).code(),
              absl::StatusCode::kDataLoss);
  }
  const std::vector<std::byte> zeros(12288);
  EXPECT_EQ(format.Verify(block, zeros).code(), absl::StatusCode::kDataLoss);
}

TEST(ExtentFormat, RefusesNamesThatDoNotFitTheHeader) {
  KvShard shard = Shard();
  shard.kv_form = std::string(65, 'x');
  EXPECT_EQ(ExtentFormat::Create(shard).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace kvasir::kvstore
