#include "kernels/paged/grouped_positions.h"

#include <cstdint>
#include <gtest/gtest.h>

namespace kvasir::kernels {
namespace {

constexpr GroupedPositions kGroupings[] = {{2, 1},    {8, 64},    {8, 100}, {7, 30},
                                           {64, 333}, {512, 100}, {3, 1000}};

int64_t Distance(const GroupedPositions& grouped, int64_t query, int64_t key) {
  const int64_t page = key / kPageTokens;
  const bool far = (grouped.FarMask(page, query) >> key % kPageTokens & 1) != 0;
  return far ? grouped.FarQuery(query) - grouped.FarKey(key) : query - key;
}

TEST(GroupedPositions, TheWindowKeepsItsDistancesAndTheRestGoesOnFromThere) {
  for (const GroupedPositions& grouped : kGroupings) {
    for (const int64_t query : {0, 1, 63, 64, 500, 1999, 2000, 4711}) {
      int64_t last = -1;
      for (int64_t key = query; key >= 0; --key) {
        const int64_t distance = Distance(grouped, query, key);
        if (query - key < grouped.window) {
          ASSERT_EQ(distance, query - key);
        }
        ASSERT_GE(distance, last);
        // If w is no multiple of g, one distance between near and far is skipped.
        ASSERT_LE(distance, last + (query - key == grouped.window ? 2 : 1))
            << "groups of " << grouped.group_size << " beyond " << grouped.window << ", query "
            << query << ", key " << key;
        last = distance;
      }
    }
  }
}

TEST(GroupedPositions, TheLongestContextHasNoDistanceThatWasNotTrained) {
  constexpr int64_t kTrained = 2048;
  for (const GroupedPositions& grouped : kGroupings) {
    const int64_t longest = grouped.LongestContext(kTrained);
    EXPECT_LT(Distance(grouped, longest - 1, 0), kTrained);
    EXPECT_GE(Distance(grouped, longest, 0), kTrained) << "longer ones would do as well";
  }
}

}  // namespace
}  // namespace kvasir::kernels
