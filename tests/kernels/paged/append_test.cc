#include "kernels/append/append.h"

#include <cmath>
#include <gtest/gtest.h>
#include <limits>
#include <vector>

#include "kernels/append/digests.h"
#include "tests/support/fake_paged_kv.h"

namespace kvasir::kernels {
namespace {

using Side = FakePagedKv::Side;

constexpr int64_t kHeads = 3;
constexpr int64_t kDim = 8;

class AppendTest : public ::testing::TestWithParam<DType> {
 protected:
  AppendTest() { kv_.Grow(1, 3 * kPageTokens); }

  // Value of element i of the key of (token row, head); the value vector holds its negative.
  static float KeyAt(int64_t row, int64_t head, int64_t i) {
    return 0.37f * static_cast<float>((row * 7 + head * 5 + i * 3) % 23) - 4.1f;
  }

  absl::Status Append(const std::vector<QueryTile>& tiles, int64_t tokens, int64_t layer = 1) {
    k_.clear();
    v_.clear();
    for (int64_t row = 0; row < tokens; ++row) {
      for (int64_t j = 0; j < kHeads * kDim; ++j) {
        k_.push_back(KeyAt(row, j / kDim, j % kDim));
        v_.push_back(-k_.back());
      }
    }
    return AppendKv({.k = TensorView(k_.data(), DType::kFloat32, {tokens, kHeads, kDim}),
                     .v = TensorView(v_.data(), DType::kFloat32, {tokens, kHeads, kDim}),
                     .kv = kv_.View(),
                     .layer = layer,
                     .tiles = tiles},
                    executor_);
  }
  float Cached(float x) const {
    return GetParam() == DType::kFloat32 ? x : static_cast<float>(BFloat16(x));
  }
  float Bound(int64_t block, int64_t head, bool max, int64_t i) {
    const std::byte* bounds = kv_.View().Bounds(1, block, 1, head);
    return kv_.Get(bounds + (max ? kv_.layout().row_bytes() : 0), i);
  }

  FakePagedKv kv_{{.num_layers = 2, .num_kv_heads = kHeads, .head_dim = kDim, .dtype = GetParam()},
                  /*num_slots=*/2,
                  /*max_blocks_per_slot=*/4};
  std::vector<float> k_;
  std::vector<float> v_;
  SerialExecutor executor_;
};

INSTANTIATE_TEST_SUITE_P(KvDtypes, AppendTest, ::testing::Values(DType::kFloat32, DType::kBFloat16),
                         [](const auto& param) {
                           return std::string(DTypeName(param.param).data());
                         });

TEST_P(AppendTest, WritesRowsAtTheirPositionsAndNowhereElse) {
  // Batch rows 1..5 go to positions 62, 63, 64, 65, 66 in two tiles. Rows 0 and 6 go nowhere.
  ASSERT_TRUE(Append({{.slot = 1, .first_row = 1, .num_rows = 2, .first_position = 62},
                      {.slot = 1, .first_row = 3, .num_rows = 3, .first_position = 64}},
                     7)
                  .ok());
  for (int64_t position = 60; position < 70; ++position) {
    for (int64_t head = 0; head < kHeads; ++head) {
      for (int64_t i = 0; i < kDim; ++i) {
        const float key = kv_.Get(kv_.Token(Side::kKey, 1, position, 1, head), i);
        const float value = kv_.Get(kv_.Token(Side::kValue, 1, position, 1, head), i);
        if (position >= 62 && position <= 66) {
          EXPECT_EQ(key, Cached(KeyAt(position - 61, head, i)));
          EXPECT_EQ(value, Cached(-KeyAt(position - 61, head, i)));
        } else {
          EXPECT_TRUE(std::isnan(key) && std::isnan(value)) << position;
        }
        EXPECT_TRUE(std::isnan(kv_.Get(kv_.Token(Side::kKey, 1, position, 0, head), i)))
            << "other layer";
      }
    }
  }
}

TEST_P(AppendTest, BoundsAreThoseOfTheCachedKeysOfThePage) {
  // Several calls of unequal size fill the page. Offset 0 restarts the bounds.
  int64_t position = 64;
  std::vector<std::vector<float>> keys;  // [position - 64][head * dim]
  for (const int64_t count : {1, 2, 30, 1, 30}) {
    ASSERT_TRUE(
        Append({{.slot = 1, .first_row = 0, .num_rows = count, .first_position = position}}, count)
            .ok());
    position += count;
    for (int64_t head = 0; head < kHeads; ++head) {
      for (int64_t i = 0; i < kDim; ++i) {
        float min = std::numeric_limits<float>::infinity();
        float max = -min;
        for (int64_t p = 64; p < position; ++p) {
          const float key = kv_.Get(kv_.Token(Side::kKey, 1, p, 1, head), i);
          min = std::min(min, key);
          max = std::max(max, key);
        }
        EXPECT_EQ(Bound(1, head, false, i), min);
        EXPECT_EQ(Bound(1, head, true, i), max);
      }
    }
  }
}

TEST_P(AppendTest, RowByRowGivesTheSameBytesAsOneBlock) {
  FakePagedKv& kv = kv_;
  ASSERT_TRUE(Append({{.slot = 1, .first_row = 0, .num_rows = 9, .first_position = 70}}, 9).ok());
  std::vector<float> whole;
  const auto snapshot = [&] {
    std::vector<float> all;
    for (int64_t p = 70; p < 79; ++p) {
      for (int64_t i = 0; i < kDim; ++i) {
        all.push_back(kv.Get(kv.Token(Side::kKey, 1, p, 1, 2), i));
        all.push_back(kv.Get(kv.Token(Side::kValue, 1, p, 1, 2), i));
      }
    }
    return all;
  };
  whole = snapshot();
  std::vector<QueryTile> rows;
  for (int64_t r = 0; r < 9; ++r) {
    rows.push_back({.slot = 1, .first_row = r, .num_rows = 1, .first_position = 70 + r});
  }
  ASSERT_TRUE(Append(rows, 9).ok());
  EXPECT_EQ(snapshot(), whole);
}

TEST_P(AppendTest, RebuildForgetsWhatATruncationCutOff) {
  ASSERT_TRUE(Append({{.slot = 1, .first_row = 0, .num_rows = 20, .first_position = 64}}, 20).ok());
  kv_.Set(kv_.Token(Side::kKey, 1, 64 + 12, 1, 0), 3, 1000.0f);
  ASSERT_TRUE(RebuildBounds(kv_.View(), 1, 1, 13).ok());
  EXPECT_EQ(Bound(1, 0, true, 3), Cached(1000.0f));
  ASSERT_TRUE(RebuildBounds(kv_.View(), 1, 1, 12).ok());
  EXPECT_LT(Bound(1, 0, true, 3), 1000.0f);
  ASSERT_TRUE(RebuildBounds(kv_.View(), 1, 1, 0).ok());
  EXPECT_EQ(Bound(1, 0, true, 3), -std::numeric_limits<float>::infinity());
}

TEST_P(AppendTest, ANanKeyDoesNotEnterTheBounds) {
  ASSERT_TRUE(Append({{.slot = 1, .first_row = 0, .num_rows = 4, .first_position = 64}}, 4).ok());
  const float max = Bound(1, 0, true, 0);
  kv_.Set(kv_.Token(Side::kKey, 1, 64, 1, 0), 1, std::numeric_limits<float>::quiet_NaN());
  ASSERT_TRUE(RebuildBounds(kv_.View(), 1, 1, 4).ok());
  EXPECT_EQ(Bound(1, 0, true, 0), max);
  EXPECT_FALSE(std::isnan(Bound(1, 0, true, 1)));
  EXPECT_FALSE(std::isnan(Bound(1, 0, false, 1)));
}

TEST_P(AppendTest, PagesOutsideTheDeviceTierAreNamedAndNothingIsWritten) {
  for (const PageTier tier : {PageTier::kHost, PageTier::kAbsent}) {
    kv_.SetTier(1, 1, 1, 2, tier);
    const absl::Status status =
        Append({{.slot = 1, .first_row = 0, .num_rows = 1, .first_position = 63},
                {.slot = 1, .first_row = 1, .num_rows = 1, .first_position = 64}},
               2);
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_NE(status.message().find("(slot 1, block 1, layer 1, KV head 2)"), std::string::npos)
        << status;
    EXPECT_TRUE(std::isnan(kv_.Get(kv_.Token(Side::kKey, 1, 63, 1, 0), 0)));
  }
}

TEST_P(AppendTest, AMissingBlockIsAbsent) {
  EXPECT_EQ(Append({{.slot = 0, .first_row = 0, .num_rows = 1, .first_position = 0}}, 1).code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST_P(AppendTest, RejectsBlocksThatDoNotFit) {
  const QueryTile good = {.slot = 1, .first_row = 0, .num_rows = 2, .first_position = 64};
  ASSERT_TRUE(Append({good}, 2).ok());
  const auto code = [&](auto change) {
    QueryTile tile = good;
    change(tile);
    return Append({tile}, 2).code();
  };
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  EXPECT_EQ(code([](QueryTile& b) { b.slot = 2; }), kInvalid);
  EXPECT_EQ(code([](QueryTile& b) { b.slot = -1; }), kInvalid);
  EXPECT_EQ(code([](QueryTile& b) { b.first_row = 1; }), kInvalid);
  EXPECT_EQ(code([](QueryTile& b) { b.num_rows = 0; }), kInvalid);
  EXPECT_EQ(code([](QueryTile& b) { b.first_position = 63; }), kInvalid) << "crosses a page";
  EXPECT_EQ(code([](QueryTile& b) { b.first_position = -1; }), kInvalid);
  EXPECT_EQ(code([](QueryTile& b) { b.first_position = 4 * 64; }), kInvalid);
}

}  // namespace
}  // namespace kvasir::kernels
