#include "kvstore/page_format.h"

#include <gtest/gtest.h>
#include <random>
#include <set>
#include <vector>

#include "tests/support/iterations.h"

namespace kvasir::kvstore {
namespace {

std::vector<std::byte> RandomBytes(size_t size, uint32_t seed) {
  std::mt19937 rng(seed);
  std::vector<std::byte> bytes(size);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(rng());
  return bytes;
}

TEST(PageChecksum, DependsOnEveryPartOfTheIdentity) {
  const std::vector<std::byte> page = RandomBytes(4096, 1);
  PrefixHash block{};
  std::set<uint64_t> seen;
  const auto add = [&](const PrefixHash& hash, uint64_t generation, int64_t layer, int64_t head) {
    seen.insert(PageChecksum(
        {.block = hash, .generation = generation, .layer = layer, .head = head}, page));
  };
  for (uint64_t generation = 0; generation < 10; ++generation) {
    for (int64_t layer = 0; layer < 10; ++layer) {
      for (int64_t head = 0; head < 10; ++head) add(block, generation, layer, head);
    }
  }
  EXPECT_EQ(seen.size(), 1000u);
  for (size_t bit = 0; bit < 256; ++bit) {
    PrefixHash other = block;
    other[bit / 8] = static_cast<uint8_t>(1 << (bit % 8));
    add(other, 0, 0, 0);
  }
  EXPECT_EQ(seen.size(), 1256u);
}

// Silent corruption: one bit anywhere in a page.
TEST(PageChecksum, FindsEverySingleBitFlip) {
  std::vector<std::byte> page = RandomBytes(512, 2);
  std::mt19937 rng(3);
  PrefixHash block{};
  const PageIdentity identity = {.block = block, .generation = 1, .layer = 2, .head = 3};
  const uint64_t checksum = PageChecksum(identity, page);
  const int64_t flips = testing::Iterations(1000000);
  for (int64_t i = 0; i < flips; ++i) {
    const size_t bit = rng() % (page.size() * 8);
    const std::byte flip = static_cast<std::byte>(1 << (bit % 8));
    page[bit / 8] ^= flip;
    ASSERT_NE(PageChecksum(identity, page), checksum) << "bit " << bit;
    page[bit / 8] ^= flip;
  }
  EXPECT_EQ(PageChecksum(identity, page), checksum);
}

}  // namespace
}  // namespace kvasir::kvstore
