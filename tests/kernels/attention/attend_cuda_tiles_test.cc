// Lists with few tokens of each page: decode makes tiles that several pages share.
#include <algorithm>
#include <cmath>
#include <gtest/gtest.h>
#include <iterator>
#include <limits>
#include <vector>

#include "kernels/attention/attend_cuda.h"
#include "tests/kernels/attention/attend_cuda_fixture.h"
#include "tests/kernels/attention/attend_cuda_patterns.h"

namespace kvasir::kernels {
namespace {

TEST_P(AttendCudaTest, TokensOfManyPagesShareTiles) {
  for (const bool rotates : {false, true}) {
    AttentionBatch batch = MakePatternBatch(Shape(), 1, 41);
    if (rotates) batch.UseCompactPositions(1.25);
    for (const Pattern& pattern : kPatterns) AddPattern(batch, 0, pattern);
    SCOPED_TRACE(rotates);
    ExpectMatchesReference(batch, Decode);
  }
}

// Unattended values are NaN.
TEST_P(AttendCudaTest, TokensThatShareTilesMayLieInTheHostTier) {
  const Pattern& pattern = kPatterns[6];
  AttentionBatch batch = MakePatternBatch(Shape(), 1, 42);
  AddPattern(batch, 0, pattern);
  for (int64_t head = 0; head < batch.shape().kv_heads; ++head) {
    for (const SelectionEntry& entry : PatternList(pattern, head).entries) {
      for (int64_t t = 0; t < kPageTokens; ++t) {
        if ((entry.live >> t & 1) != 0) continue;
        for (const auto side : {FakePagedKv::Side::kKey, FakePagedKv::Side::kValue}) {
          Poison(batch, side, entry.page * kPageTokens + t, head);
        }
      }
      if (entry.page % 2 == 0) continue;
      batch.kv().SetTier(0, entry.page, AttentionBatch::kLayer, head, PageTier::kHost);
    }
  }
  ExpectMatchesReference(batch, Decode);
}

// Absent pages are left out, and the other rows keep their bits.
TEST_P(AttendCudaTest, AbsentPagesAmongTokensThatShareTiles) {
  AttentionBatch batch = MakePatternBatch(Shape(), 2, 43);
  for (int64_t slot = 0; slot < 2; ++slot) AddPattern(batch, slot, kPatterns[3]);
  ASSERT_TRUE(DeviceAttentionBatch(batch).Run(Decode).ok());
  const std::vector<float> all = Outputs(batch);
  batch.kv().SetTier(1, 7, AttentionBatch::kLayer, 0, PageTier::kAbsent);
  ASSERT_TRUE(DeviceAttentionBatch(batch).Run(Decode).ok());
  EXPECT_EQ(batch.fault(0), 0);
  EXPECT_EQ(batch.fault(1), 1);
  const std::vector<float> rest = Outputs(batch);
  EXPECT_TRUE(std::equal(all.begin(), all.begin() + std::ssize(all) / 2, rest.begin()));
  EXPECT_TRUE(std::all_of(rest.begin(), rest.end(), [](float x) { return std::isfinite(x); }));
}

}  // namespace
}  // namespace kvasir::kernels
