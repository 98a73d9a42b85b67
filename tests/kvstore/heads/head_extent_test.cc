#include "kvstore/format/head_extent.h"

#include <cstring>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <vector>

#include "tests/kvstore/heads/head_blocks.h"

namespace kvasir::kvstore {
namespace {

using ::testing::HasSubstr;

ExtentMemory Memory(const ExtentFormat& format) {
  return ExtentMemory::Allocate(1, format.extent_bytes()).value();
}

// A part of `count` heads, from a rank of `held` heads.
void ExpectSameFromAnyRank(int64_t first, int64_t count, int64_t held) {
  const ExtentFormat alone = RankFormat(first, count);
  const NamedBlock expected(alone, 7, 5);
  const ExtentFormat rank = RankFormat(first / held * held, held);
  const NamedBlock block(rank, 7, 5);
  const HeadExtent part = HeadExtent::Create(rank, {first, count}).value();
  EXPECT_EQ(part.format().Fingerprint(), alone.Fingerprint());
  const ExtentMemory memory = Memory(alone);
  std::memset(memory[0].data(), 0xaa, memory[0].size());  // nothing of it is left
  part.Gather(block.identity, block.extent, memory[0]);
  EXPECT_TRUE(alone.Verify(block.identity, memory[0]).ok());
  EXPECT_EQ(std::memcmp(memory[0].data(), expected.extent.data(), memory[0].size()), 0)
      << count << " heads from " << first << " of " << held;
}

TEST(HeadExtent, IsTheSameFromARankOfAnyDegree) {
  for (const int64_t count : {1, 2, 4}) {
    for (int64_t first = 0; first < 4; first += count) {
      for (int64_t held = count; held <= 4; held *= 2) ExpectSameFromAnyRank(first, count, held);
    }
  }
}

// The heads were sealed apart, by ranks that counted differently.
TEST(HeadExtent, HeadsOfSeveralSealingsMakeOneWholeExtent) {
  const ExtentFormat rank = RankFormat(0, 4);
  const NamedBlock expected(rank, 7, 5);
  const ExtentMemory memory = Memory(rank);
  for (const HeadRange heads : {HeadRange{0, 1}, HeadRange{1, 2}, HeadRange{3, 1}}) {
    const NamedBlock stored(RankFormat(heads.first, heads.count), 7,
                            100 + static_cast<uint64_t>(heads.first));
    HeadExtent::Create(rank, heads).value().Scatter(stored.extent, memory[0]);
    EXPECT_FALSE(rank.Verify(expected.identity, memory[0]).ok()) << "it has no header";
  }
  rank.WriteHeader(expected.identity, memory[0]);
  EXPECT_TRUE(rank.Verify(expected.identity, memory[0]).ok());
  EXPECT_EQ(std::memcmp(memory[0].data(), expected.extent.data(), memory[0].size()), 0);
}

TEST(HeadExtent, AHeadInAnothersPlaceIsFound) {
  const ExtentFormat rank = RankFormat(0, 2);
  NamedBlock block(rank, 7, 5);
  const NamedBlock stranger(RankFormat(2, 1), 7, 5);
  HeadExtent::Create(rank, {1, 1}).value().Scatter(stranger.extent, block.extent);
  rank.WriteHeader(block.identity, block.extent);
  EXPECT_THAT(std::string(rank.Verify(block.identity, block.extent).message()),
              HasSubstr("layer 0, KV head 1"));
}

TEST(HeadExtent, AHeadThatTheRankDoesNotHoldIsRefused) {
  for (const HeadRange heads :
       {HeadRange{1, 1}, HeadRange{4, 1}, HeadRange{3, 2}, HeadRange{2, 0}}) {
    const absl::Status status = HeadExtent::Create(RankFormat(2, 2), heads).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("2 KV heads from 2"));
  }
}

// The numbers of docs/page_format.md.
TEST(HeadExtent, HasTheSizesOfTheExample) {
  KvShard shard = SmallShard();
  shard.layout = {
      .num_layers = 32, .num_kv_heads = 8, .head_dim = 128, .dtype = kernels::DType::kBFloat16};
  const ExtentFormat head =
      HeadExtent::Create(ExtentFormat::Create(shard).value(), {5, 1}).value().format();
  EXPECT_EQ(head.bounds_offset(), 4352);
  EXPECT_EQ(head.pages_offset(), 24576);
  EXPECT_EQ(head.page_offset(3), 122880);
  EXPECT_EQ(head.extent_bytes(), 1073152);
}

}  // namespace
}  // namespace kvasir::kvstore
