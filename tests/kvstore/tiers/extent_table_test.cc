#include "kvstore/tiers/extent_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace kvasir::kvstore {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

PrefixHash Hash(int number) {
  PrefixHash hash{};
  hash[0] = static_cast<PrefixHash::value_type>(number);
  return hash;
}

// Blocks 1 to 3, added in this order.
class ExtentTableTest : public testing::Test {
 protected:
  ExtentTableTest() {
    for (const int number : {1, 2, 3}) Add(number, /*generation=*/1);
  }
  void Add(int number, uint64_t generation) {
    table_.Add(table_.NewRecord({.hash = Hash(number), .generation = generation, .tokens = {}},
                                {.segment = 0, .offset = number}));
  }

  ExtentTable table_;
};

TEST_F(ExtentTableTest, WhatIsUsedLeavesLast) {
  EXPECT_TRUE(table_.Touch(Hash(1)));
  EXPECT_THAT(table_.ToEvict(2), ElementsAre(Hash(2), Hash(3)));
  EXPECT_THAT(table_.ToEvict(9), ElementsAre(Hash(2), Hash(3), Hash(1)));
}

TEST_F(ExtentTableTest, ABlockStaysWhileAnyoneReadsIt) {
  const BlockIdentity block = table_.BeginRead(Hash(1))->block;
  ASSERT_TRUE(table_.BeginRead(Hash(1)).has_value());
  EXPECT_THAT(table_.ToEvict(1), ElementsAre(Hash(2)));
  EXPECT_TRUE(table_.EndRead(block));
  EXPECT_THAT(table_.ToEvict(1), ElementsAre(Hash(2))) << "one reader of two is left";
  EXPECT_TRUE(table_.EndRead(block));
  EXPECT_THAT(table_.ToEvict(1), ElementsAre(Hash(1)));
}

TEST_F(ExtentTableTest, AReadEndsWithTheBlockThatItFound) {
  const BlockIdentity block = table_.BeginRead(Hash(1))->block;
  ASSERT_TRUE(table_.Remove(Hash(1)).has_value());
  EXPECT_FALSE(table_.EndRead(block)) << "it is gone";
  Add(1, /*generation=*/2);
  EXPECT_FALSE(table_.EndRead(block)) << "another block has its hash";
  EXPECT_THAT(table_.ToEvict(9), ElementsAre(Hash(2), Hash(3), Hash(1)));
}

TEST_F(ExtentTableTest, UsesAreRecordedOnceAndOnlyOfWhatIsHere) {
  for (const int number : {3, 1, 3}) EXPECT_TRUE(table_.Touch(Hash(number)));
  ASSERT_TRUE(table_.Remove(Hash(1)).has_value());
  const std::vector<ManifestRecord> records = table_.TakeTouched();
  ASSERT_EQ(records.size(), 1u);
  EXPECT_EQ(records[0].block.hash, Hash(3));
  EXPECT_THAT(table_.TakeTouched(), IsEmpty());
  EXPECT_FALSE(table_.Touch(Hash(1)));
}

}  // namespace
}  // namespace kvasir::kvstore
