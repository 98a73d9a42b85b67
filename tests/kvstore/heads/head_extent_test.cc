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

TEST(HeadExtent, IsTheSameFromARankOfAnyDegree) {
  for (int64_t head = 0; head < 4; ++head) {
    const ExtentFormat alone = RankFormat(head, 1);
    const NamedBlock expected(alone, 7, 5);
    for (const int64_t count : {1, 2, 4}) {
      const ExtentFormat rank = RankFormat(head / count * count, count);
      const NamedBlock block(rank, 7, 5);
      const HeadExtent part = HeadExtent::Create(rank, head).value();
      EXPECT_EQ(part.format().Fingerprint(), alone.Fingerprint());
      const ExtentMemory memory = Memory(alone);
      part.Gather(block.identity, block.extent, memory[0]);
      EXPECT_TRUE(alone.Verify(block.identity, memory[0]).ok());
      EXPECT_EQ(std::memcmp(memory[0].data(), expected.extent.data(), memory[0].size()), 0)
          << "head " << head << " of " << count;
    }
  }
}

// The heads were sealed apart, by ranks that counted differently.
TEST(HeadExtent, HeadsOfSeveralSealingsMakeOneWholeExtent) {
  const ExtentFormat rank = RankFormat(0, 4);
  const NamedBlock expected(rank, 7, 5);
  const ExtentMemory memory = Memory(rank);
  for (int64_t head = 0; head < 4; ++head) {
    const NamedBlock stored(RankFormat(head, 1), 7, 100 + static_cast<uint64_t>(head));
    HeadExtent::Create(rank, head).value().Scatter(stored.extent, memory[0]);
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
  HeadExtent::Create(rank, 1).value().Scatter(stranger.extent, block.extent);
  rank.WriteHeader(block.identity, block.extent);
  EXPECT_THAT(std::string(rank.Verify(block.identity, block.extent).message()),
              HasSubstr("layer 0, KV head 1"));
}

TEST(HeadExtent, AHeadThatTheRankDoesNotHoldIsRefused) {
  for (const int64_t head : {1, 4}) {
    const absl::Status status = HeadExtent::Create(RankFormat(2, 2), head).status();
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
      HeadExtent::Create(ExtentFormat::Create(shard).value(), 5).value().format();
  EXPECT_EQ(head.bounds_offset(), 4352);
  EXPECT_EQ(head.pages_offset(), 24576);
  EXPECT_EQ(head.page_offset(3), 122880);
  EXPECT_EQ(head.extent_bytes(), 1073152);
}

}  // namespace
}  // namespace kvasir::kvstore
