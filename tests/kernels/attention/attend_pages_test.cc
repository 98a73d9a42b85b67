// Poisoned tokens, absent pages and the record of what is read.
#include <cmath>
#include <functional>
#include <gtest/gtest.h>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/attention/attend.h"
#include "tests/kernels/attention/attend_fixture.h"
#include "tests/kernels/attention/attend_oracle.h"
#include "tests/support/few_frames.h"

namespace kvasir::kernels {
namespace {

using Side = FakePagedKv::Side;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Unattended NaN does not reach the output, whether in a masked token of an attended page, in an
// unselected page, after the context, or in the future of an earlier row.
TEST_P(AttendTest, UnattendedNanDoesNotLeak) {
  for (const AttentionShape shape :
       {AttentionShape{.kv = DType::kFloat32}, AttentionShape{.kv = DType::kBFloat16},
        AttentionShape{.activation = DType::kBFloat16, .kv = DType::kBFloat16}}) {
    SCOPED_TRACE(Describe(shape));
    AttentionBatch batch(shape, 1, 640, 18);
    batch.FillContext(0, 600);  // 600..639 stay NaN
    batch.AddBlock(0, 599, 1, [&](int64_t) { return ListWithHoles(599, batch.rng()); });
    for (int64_t token = 0; token < 599; ++token) {
      for (int64_t head = 0; head < 2; ++head) {
        if (Selected(batch.selection(0, head), token)) continue;
        for (const Side side : {Side::kKey, Side::kValue}) {
          std::byte* memory = batch.kv().Token(side, 0, token, AttentionBatch::kLayer, head);
          for (int64_t i = 0; i < 64; ++i) batch.kv().Set(memory, i, kNan);
        }
      }
    }
    Run(batch);
    ExpectMatchesOracle(batch);
  }
}

TEST_P(AttendTest, NanInATokensKvReachesOnlyTheRowsThatSeeIt) {
  for (const DType activation : {DType::kFloat32, DType::kBFloat16}) {
    for (const Side side : {Side::kKey, Side::kValue}) {
      for (const int64_t poisoned : {40, 41}) {  // the first and the second of a pair
        AttentionBatch batch(
            {.activation = activation, .kv = DType::kBFloat16, .kv_heads = 1, .group = 2}, 1, 192,
            19);
        batch.FillContext(0, 192);
        batch.kv().Set(batch.kv().Token(side, 0, 128 + poisoned, AttentionBatch::kLayer, 0), 5,
                       kNan);
        batch.AddBlock(0, 128, 64);
        Run(batch);
        for (int64_t row = 0; row < 64; ++row) {
          for (int64_t head = 0; head < 2; ++head) {
            EXPECT_EQ(std::isnan(batch.out(row, head)[5]), row >= poisoned) << "row " << row;
          }
        }
      }
    }
  }
}

TEST_P(AttendTest, NanInAQueryStaysInItsRowAndIsSeen) {
  for (const DType kv : {DType::kFloat32, DType::kBFloat16}) {
    AttentionBatch batch({.kv = kv, .kv_heads = 1, .group = 2}, 1, 2200, 20);
    batch.FillContext(0, 2200);
    batch.AddBlock(0, 2112, 64);
    batch.q(7, 1)[0] = kNan;
    Run(batch);
    for (int64_t row = 0; row < 64; ++row) {
      for (int64_t head = 0; head < 2; ++head) {
        const bool poisoned = row == 7 && head == 1;
        EXPECT_EQ(std::isnan(batch.out(row, head)[0]), poisoned);
        EXPECT_EQ(std::isnan(batch.out(row, head)[63]), poisoned);
        EXPECT_EQ(std::isnan(batch.lse(row, head)), poisoned);
      }
    }
  }
}

TEST_P(AttendTest, AbsentPagesSetTheFaultOfTheirSlotOnly) {
  AttentionBatch batch({}, 3, 2304, 21);
  for (int64_t slot = 0; slot < 3; ++slot) {
    batch.FillContext(slot, 2304);
    batch.AddBlock(slot, 2303, 1, [&](int64_t) { return SelectList(0, 2300, {Whole(3)}); });
  }
  batch.kv().SetTier(1, 3, AttentionBatch::kLayer, 0, PageTier::kAbsent);
  batch.kv().SetTier(2, 4, AttentionBatch::kLayer, 0, PageTier::kAbsent);  // not selected
  Run(batch);
  EXPECT_EQ(batch.fault(0), 0);
  EXPECT_EQ(batch.fault(1), 1);
  EXPECT_EQ(batch.fault(2), 0);
}

TEST_P(AttendTest, ABlockThatTheSlotDoesNotHaveIsAbsent) {
  AttentionBatch batch({}, 2, 256, 22);
  batch.FillContext(0, 256);
  batch.FillContext(1, 64);
  batch.AddBlock(1, 200, 1);
  Run(batch);
  EXPECT_EQ(batch.fault(1), 1);
}

// The portable kernel held the pages of a tile until its last query, and read what had come in
// their place.
TEST_P(AttendTest, APageFromDiskIsUsedNoLongerThanItStays) {
  constexpr int64_t kTokens = 2304;
  for (const DType kv : {DType::kFloat32, DType::kBFloat16, DType::kInt8}) {
    for (const int64_t head_dim : {64, 24}) {
      for (const auto& [positions, prepare] :
           std::vector<std::pair<std::string, std::function<void(AttentionBatch&)>>>{
               {"native", [](AttentionBatch&) {}},
               {"compact", [](AttentionBatch& batch) { batch.UseCompactPositions(); }},
               {"grouped",
                [](AttentionBatch& batch) {
                  batch.UseGroupedPositions({.group_size = 4, .window = 300});
                }},
               {"window", [](AttentionBatch& batch) { batch.UseWindow(1000); }}}) {
        if (kv == DType::kInt8 && head_dim == 24) continue;
        SCOPED_TRACE(testing::Message() << DTypeName(kv) << " " << head_dim << " " << positions);
        const auto make = [&] {
          auto batch = std::make_unique<AttentionBatch>(
              AttentionShape{.kv = kv, .head_dim = head_dim}, 1, kTokens, 24);
          prepare(*batch);
          batch->FillContext(0, kTokens);
          batch->AddBlock(0, 2240, 64);
          batch->AddBlock(0, 2303, 1);
          return batch;
        };
        const auto expected = make(), batch = make();
        const FewFrames frames(batch->kv());
        Run(*expected);
        Run(*batch);
        EXPECT_GT(frames.num_left(PageUse::kAttend), 0);
        EXPECT_EQ(batch->fault(0), 0);
        for (int64_t row = 0; row < batch->num_tokens(); ++row) {
          ExpectSameRow(*expected, row, *batch, row);
        }
      }
    }
  }
}

TEST_P(AttendTest, ReadsAreRecordedWithTheBytesAttendedTo) {
  AttentionBatch batch({.kv = DType::kBFloat16}, 1, 512, 23);
  batch.FillContext(0, 512);
  batch.AddBlock(0, 500, 1, [](int64_t) {
    return SelectList(0, 448, {{.page = 2, .chosen = kWholePage, .live = 0b10110}, Whole(3)});
  });
  for (const int64_t block : {2, 3, 4, 7}) {
    batch.kv().SetTier(0, block, AttentionBatch::kLayer, 1, PageTier::kHost);
  }
  Run(batch);
  const auto missed = [&](int64_t block, int64_t head) {
    return batch.kv().missed_bytes(0, block, AttentionBatch::kLayer, head);
  };
  constexpr uint32_t kTokenBytes = 2 * 64 * 2;
  EXPECT_EQ(missed(2, 1), 3 * kTokenBytes);
  EXPECT_EQ(missed(3, 1), 64 * kTokenBytes);
  EXPECT_EQ(missed(4, 1), 0u) << "not selected";
  EXPECT_EQ(missed(7, 1), 53 * kTokenBytes) << "up to position 500";
  EXPECT_EQ(missed(3, 0), 0u) << "in the device tier";
  for (int64_t block = 0; block < 8; ++block) {
    const bool selected = block == 2 || block == 3 || block == 7;
    for (const int64_t head : {0, 1}) {
      EXPECT_EQ(batch.kv().last_touched(0, block, AttentionBatch::kLayer, head),
                selected ? 1u : 0u);
      EXPECT_EQ(batch.kv().last_touched(0, block, 0, head), 0u) << "other layer";
    }
  }
}

}  // namespace
}  // namespace kvasir::kernels
