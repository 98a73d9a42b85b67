#include "kernels/paged/row_items.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <map>
#include <random>
#include <vector>

namespace kvasir::kernels {
namespace {

using Masks = std::map<int64_t, uint64_t>;  // by page

// Collects every item of the row. No token may be named twice.
Masks FromItems(const SelectionHeader& header, const std::vector<SelectionEntry>& list,
                int64_t last_position) {
  const RowItems items = NumberItems(header, last_position);
  Masks masks;
  for (int64_t i = 0; i < items.num_items; ++i) {
    const RowItem item = FindItem(items, header, list.data(), i);
    if (item.mask == 0) continue;
    EXPECT_EQ(masks[item.page] & item.mask, 0u) << "page " << item.page;
    masks[item.page] |= item.mask;
  }
  return masks;
}

int64_t CountPages(const SelectionHeader& header, const std::vector<SelectionEntry>& list,
                   int64_t last_position) {
  const RowItems items = NumberItems(header, last_position);
  int64_t pages = 0;
  for (int64_t i = 0; i < items.num_items; ++i) {
    if (FindItem(items, header, list.data(), i).mask == 0) continue;
    pages += IsAnotherPage(items, header, list.data(), i) ? 1 : 0;
  }
  return pages;
}

Masks FromWalk(const SelectionHeader& header, const std::vector<SelectionEntry>& list,
               int64_t last_position) {
  std::vector<SelectionEntry> masked = list;  // attention masks entries in sink and window
  for (SelectionEntry& entry : masked) {
    const int64_t start = entry.page * kPageTokens;
    entry.live &= TokenMask(header.sink_end - start, header.window_begin - start);
  }
  Masks masks;
  for (SelectedPages walk(header, masked.data(), last_position); walk.valid(); walk.Next()) {
    masks[walk.page()] = walk.mask();
  }
  return masks;
}

TEST(RowItems, NameTheTokensThatSelectedPagesWalks) {
  std::mt19937_64 rng(5);
  for (int round = 0; round < 2000; ++round) {
    const int64_t last = static_cast<int64_t>(rng() % 2000);
    const int64_t window_begin = static_cast<int64_t>(rng() % static_cast<uint64_t>(last + 1));
    SelectionHeader header = {
        .kind = SelectionHeader::Kind::kList,
        .sink_end = static_cast<int64_t>(rng() % static_cast<uint64_t>(window_begin + 1)),
        .window_begin = window_begin};
    std::vector<SelectionEntry> list;
    for (int64_t page = 0; page <= last / kPageTokens; ++page) {
      if (rng() % 2 == 0) list.push_back({.page = page, .live = rng()});
    }
    header.count = static_cast<int32_t>(list.size());
    for (const auto kind : {SelectionHeader::Kind::kList, SelectionHeader::Kind::kAll}) {
      header.kind = kind;
      const Masks masks = FromItems(header, list, last);
      EXPECT_EQ(masks, FromWalk(header, list, last)) << "round " << round;
      EXPECT_EQ(CountPages(header, list, last), std::ssize(masks)) << "round " << round;
    }
  }
}

// Seen from the query's far position, every key is at its distance by grouped positions.
TEST(RowItems, KeysStandWhereGroupedPositionsSay) {
  constexpr GroupedPositions kGroupings[] = {{1, 64},  {2, 1},    {4, 128},  {7, 100},
                                             {64, 70}, {65, 200}, {500, 90}, {4, 5000}};
  for (const GroupedPositions& grouped : kGroupings) {
    for (const int64_t query : {0, 1, 63, 64, 99, 100, 127, 128, 191, 192, 500, 1499}) {
      int64_t far = 0, near = 0;
      for (int64_t key = 0; key <= query; ++key) {
        const int64_t page = key / kPageTokens;
        const bool is_near = query - key < grouped.window;
        ++(is_near ? near : far);
        const int64_t expected =
            is_near ? query - key : grouped.FarQuery(query) - grouped.FarKey(key);
        const int64_t at =
            FindGroupedPositions(grouped, page, query).of(static_cast<int>(key % kPageTokens));
        ASSERT_GE(at, 0);
        ASSERT_EQ(grouped.FarQuery(query) - at, expected)
            << "groups of " << grouped.group_size << " beyond " << grouped.window << ", query "
            << query << ", key " << key;
      }
      EXPECT_GT(near, 0);
      EXPECT_EQ(far > 0, query >= grouped.window);
    }
  }
}

TEST(RowItems, KeysStandWhereCompactPositionsSay) {
  std::mt19937_64 rng(6);
  for (int round = 0; round < 200; ++round) {
    const int64_t last = 1000 + static_cast<int64_t>(rng() % 500);
    SelectionHeader header = {.kind = SelectionHeader::Kind::kList,
                              .sink_end = static_cast<int64_t>(rng() % 150),
                              .window_begin = 700 + static_cast<int64_t>(rng() % 200)};
    std::vector<SelectionEntry> list;
    for (int64_t page = 0; page <= last / kPageTokens; ++page) {
      const uint64_t chosen = rng();
      if (rng() % 2 == 0) list.push_back({.page = page, .chosen = chosen, .live = chosen & rng()});
    }
    header.count = static_cast<int32_t>(list.size());
    AssignPositions({.headers = &header, .entries = list.data(), .num_rows = 1, .capacity = 0});
    for (const auto kind : {SelectionHeader::Kind::kList, SelectionHeader::Kind::kAll}) {
      header.kind = kind;
      const RowItems items = NumberItems(header, last);
      for (int64_t i = 0; i < items.num_items; ++i) {
        const RowItem item = FindItem(items, header, list.data(), i);
        const ItemPositions positions = FindPositions(items, header, list.data(), i);
        const SelectionEntry* entry = nullptr;
        for (const SelectionEntry& e : list) {
          if (e.page == item.page) entry = &e;
        }
        for (int t = 0; t < kPageTokens; ++t) {
          if ((item.mask >> t & 1) == 0) continue;
          ASSERT_EQ(positions.of(t), TokenPosition(header, entry, item.page * kPageTokens + t))
              << "item " << i << " token " << t;
        }
      }
    }
  }
}

TEST(RowItems, EveryUnitHasAnItemAndTheyStayWithinTheLimit) {
  for (const int64_t kv_heads : {1, 2, 8, 128, 200}) {
    for (int64_t items = 1; items < 20'000; items += 7) {
      const int64_t units = NumDecodeUnits(items, kv_heads);
      EXPECT_GE(units, 1) << items;
      EXPECT_LE(units, MaxDecodeUnits(kv_heads)) << items;
      EXPECT_LE(units, items);
      if (units < MaxDecodeUnits(kv_heads)) {
        EXPECT_LE(items, units * kDecodeUnitItems);
      }
      if (units > 1) {
        EXPECT_GE(items, (units - 1) * kDecodeUnitItems);
      }
    }
  }
}

TEST(RowItems, ABatchIsCutIntoTasksThatEndTogether) {
  constexpr int64_t kCtas = 132;
  for (int64_t units = 1; units <= 16; ++units) {
    EXPECT_EQ(DecodeUnitsAtOnce(8, units, kCtas), 1) << "a stream: a CTA for each unit";
  }
  EXPECT_EQ(DecodeUnitsAtOnce(64, 16, kCtas), 8) << "128 tasks";
  EXPECT_EQ(DecodeUnitsAtOnce(128, 5, kCtas), 5) << "a row for each CTA";
  EXPECT_EQ(DecodeUnitsAtOnce(512, 5, kCtas), 5);
  EXPECT_EQ(DecodeUnitsAtOnce(192, 4, kCtas), 2) << "whole rows would be two of them for some CTAs";
  for (const int64_t rows : {1, 7, 64, 100, 192, 512, 2048}) {
    for (int64_t units = 1; units <= 128; ++units) {
      const int64_t at_once = DecodeUnitsAtOnce(rows, units, kCtas);
      ASSERT_GE(at_once, 1);
      ASSERT_LE(at_once, std::min(units, kMostUnitsAtOnce));
      const auto most_units = [&](int64_t of_task) {
        const int64_t tasks = rows * ((units + of_task - 1) / of_task);
        return (tasks + kCtas - 1) / kCtas * of_task;
      };
      EXPECT_LE(2 * most_units(at_once), 3 * most_units(1)) << rows << " rows of " << units;
    }
  }
}

}  // namespace
}  // namespace kvasir::kernels
