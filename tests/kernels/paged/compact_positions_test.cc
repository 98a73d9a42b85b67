#include "kernels/paged/compact_positions.h"

#include <cstring>
#include <gtest/gtest.h>
#include <random>
#include <vector>

namespace kvasir::kernels {
namespace {

using Kind = SelectionHeader::Kind;

struct Row {
  SelectionHeader header;
  std::vector<SelectionEntry> list;
};

void Assign(Row& row) {
  row.header.count = static_cast<int32_t>(row.list.size());
  AssignPositions({.headers = &row.header,
                   .entries = row.list.data(),
                   .num_rows = 1,
                   .capacity = static_cast<int64_t>(row.list.size())});
}

// A sink of 70 tokens, a window from 600 on, and some tokens of some pages between them.
Row RandomRow(std::mt19937_64& rng) {
  Row row = {.header = {.kind = Kind::kList, .sink_end = 70, .window_begin = 600}, .list = {}};
  for (int64_t page = 1; page < 10; ++page) {
    if (rng() % 2 == 0) continue;
    uint64_t chosen = rng() & rng();
    if (page == 1) chosen &= ~uint64_t{0x3f};   // no chosen token in the sink
    if (page == 9) chosen &= TokenMask(0, 24);  // no chosen token in the window
    row.list.push_back({.page = page, .chosen = chosen, .live = chosen & rng()});
  }
  Assign(row);
  return row;
}

TEST(CompactPositions, WhatIsChosenStandsSideBySideWhetherPrunedOrNot) {
  std::mt19937_64 rng(1);
  for (int i = 0; i < 200; ++i) {
    const Row row = RandomRow(rng);
    int64_t position = 0;
    for (int64_t token = 0; token < 700; ++token) {
      const SelectionEntry* entry = nullptr;
      for (const SelectionEntry& e : row.list) {
        if (e.page == token / kPageTokens) entry = &e;
      }
      const bool listed = entry != nullptr && (entry->chosen >> (token % kPageTokens) & 1) != 0;
      if (token >= 70 && token < 600 && !listed) continue;
      ASSERT_EQ(TokenPosition(row.header, entry, token), position) << "token " << token;
      if (token >= 600) {
        ASSERT_EQ(QueryPosition(row.header, token), position);
      }
      ++position;
    }
  }
}

TEST(CompactPositions, WhatAListHoldsOfSinkAndWindowLeavesItsGap) {
  Row row = {.header = {.kind = Kind::kList, .sink_end = 10, .window_begin = 150},
             .list = {{.page = 0, .chosen = ~uint64_t{0}}, {.page = 2, .chosen = ~uint64_t{0}}}};
  Assign(row);
  EXPECT_EQ(row.header.compact_length, 10 + 2 * 64);
  EXPECT_EQ(TokenPosition(row.header, &row.list[0], 9), 9);
  EXPECT_EQ(TokenPosition(row.header, &row.list[0], 10), 10 + 10);
  EXPECT_EQ(TokenPosition(row.header, &row.list[1], 149), 10 + 64 + 21);
  EXPECT_EQ(TokenPosition(row.header, &row.list[1], 150), 10 + 2 * 64);
  // The window slides; the list keeps its positions.
  row.header.window_begin = 160;
  Assign(row);
  EXPECT_EQ(TokenPosition(row.header, &row.list[1], 149), 10 + 64 + 21);
  EXPECT_EQ(QueryPosition(row.header, 160), 10 + 2 * 64);
}

TEST(CompactPositions, AllKeepsTheTokensOwn) {
  const SelectionHeader header = {.kind = Kind::kAll};
  EXPECT_EQ(TokenPosition(header, nullptr, 12345), 12345);
  EXPECT_EQ(QueryPosition(header, 12345), 12345);
}

TEST(CompactPositions, KeysAreRotatedEachToItsOwn) {
  const std::vector<double> inv_freq = {1, 0.3, 0.01, 0.002};
  RopePositions rope(inv_freq, 1.5);
  SerialExecutor executor;
  rope.Reserve(1000, executor);
  const KvLayout layout = {
      .num_layers = 1, .num_kv_heads = 1, .head_dim = 8, .dtype = DType::kFloat32};
  std::mt19937_64 rng(2);
  std::vector<float> keys(kPageTokens * 8), rotated(kPageTokens * 8, -1);
  for (float& x : keys) x = std::normal_distribution<float>()(rng);
  for (int i = 0; i < 50; ++i) {
    Row row = RandomRow(rng);
    row.header.sink_end = 90;  // the list reaches into both ranges
    row.header.window_begin = 590;
    Assign(row);
    std::vector<float> before = rotated;
    for (SelectedPages walk(row.header, row.list.data(), 660); walk.valid(); walk.Next()) {
      before = rotated;
      RotateKeys(rope, layout, row.header,
                 {.keys = reinterpret_cast<const std::byte*>(keys.data()),
                  .page = walk.page(),
                  .mask = walk.mask(),
                  .entry = walk.entry()},
                 reinterpret_cast<std::byte*>(rotated.data()));
      for (int64_t t = 0; t < kPageTokens; ++t) {
        std::vector<float> expected(before.begin() + t * 8, before.begin() + t * 8 + 8);
        if ((walk.mask() >> t & 1) != 0) {
          expected.assign(keys.begin() + t * 8, keys.begin() + t * 8 + 8);
          rope.Rotate(expected.data(), DType::kFloat32, 1,
                      TokenPosition(row.header, walk.entry(), walk.page() * kPageTokens + t));
        }
        ASSERT_EQ(std::memcmp(expected.data(), &rotated[static_cast<size_t>(t * 8)], 32), 0)
            << "page " << walk.page() << " token " << t;
      }
    }
  }
}

}  // namespace
}  // namespace kvasir::kernels
