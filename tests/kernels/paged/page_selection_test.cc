#include "kernels/paged/page_selection.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <random>
#include <set>
#include <vector>

namespace kvasir::kernels {
namespace {

// The definition in the header comment, token by token.
bool Attended(const SelectionHeader& header, const std::vector<SelectionEntry>& list, int64_t token,
              int64_t last_position) {
  if (token > last_position) return false;
  if (header.kind == SelectionHeader::Kind::kAll) return true;
  if (token < header.sink_end || token >= header.window_begin) return true;
  for (const SelectionEntry& entry : list) {
    if (entry.page == token / kPageTokens) return (entry.live >> (token % kPageTokens) & 1) != 0;
  }
  return false;
}

void ExpectWalkMatchesDefinition(SelectionHeader header, const std::vector<SelectionEntry>& list,
                                 int64_t last_position) {
  header.count = static_cast<int32_t>(list.size());
  int64_t previous = -1;
  std::set<int64_t> walked;
  for (SelectedPages walk(header, list.data(), last_position); walk.valid(); walk.Next()) {
    ASSERT_GT(walk.page(), previous) << "pages ascend, each once";
    ASSERT_NE(walk.mask(), 0u);
    previous = walk.page();
    for (int64_t t = 0; t < kPageTokens; ++t) {
      if ((walk.mask() >> t & 1) != 0) walked.insert(walk.page() * kPageTokens + t);
    }
  }
  for (int64_t token = 0; token <= last_position + 2 * kPageTokens; ++token) {
    ASSERT_EQ(walked.contains(token), Attended(header, list, token, last_position))
        << "token " << token << " sink_end " << header.sink_end << " window_begin "
        << header.window_begin << " last " << last_position;
  }
}

TEST(TokenMask, MarksTheRangeClampedToThePage) {
  EXPECT_EQ(TokenMask(0, 64), ~uint64_t{0});
  EXPECT_EQ(TokenMask(-100, 1000), ~uint64_t{0});
  EXPECT_EQ(TokenMask(0, 0), 0u);
  EXPECT_EQ(TokenMask(5, 5), 0u);
  EXPECT_EQ(TokenMask(6, 5), 0u);
  EXPECT_EQ(TokenMask(63, 64), uint64_t{1} << 63);
  EXPECT_EQ(TokenMask(1, 3), 0b110u);
  EXPECT_EQ(TokenMask(64, 70), 0u);
  EXPECT_EQ(TokenMask(-5, -1), 0u);
}

TEST(SelectedPages, AllWalksEveryPageUpToTheLastQuery) {
  for (const int64_t last : {0, 1, 62, 63, 64, 65, 127, 128, 2047, 2048}) {
    ExpectWalkMatchesDefinition({.kind = SelectionHeader::Kind::kAll}, {}, last);
  }
}

TEST(SelectedPages, AllIgnoresTheListAndTheRanges) {
  ExpectWalkMatchesDefinition(
      {.kind = SelectionHeader::Kind::kAll, .sink_end = 3, .window_begin = 200},
      {{.page = 1, .chosen = 1, .live = 1}}, 300);
}

TEST(SelectedPages, PrunedEntriesAreNotWalked) {
  const SelectionHeader header = {
      .kind = SelectionHeader::Kind::kList, .sink_end = 0, .window_begin = 500};
  const std::vector<SelectionEntry> list = {{.page = 2, .chosen = ~uint64_t{0}, .live = 0},
                                            {.page = 4, .chosen = ~uint64_t{0}, .live = 0b1010}};
  ExpectWalkMatchesDefinition(header, list, 510);
}

// SkipTo(page) from anywhere ends where a walk from the start first reaches a page >= `page`.
void ExpectSkipMatchesWalk(SelectionHeader header, const std::vector<SelectionEntry>& list,
                           int64_t last_position, std::mt19937_64& rng) {
  header.count = static_cast<int32_t>(list.size());
  SelectedPages skipping(header, list.data(), last_position);
  while (skipping.valid()) {
    const int64_t from = skipping.page();
    const int64_t to = from - 1 + static_cast<int64_t>(rng() % 5);
    SelectedPages stepping(header, list.data(), last_position);
    while (stepping.valid() && stepping.page() < std::max(from, to)) stepping.Next();
    skipping.SkipTo(to);
    ASSERT_EQ(skipping.valid(), stepping.valid());
    if (!skipping.valid()) return;
    ASSERT_EQ(skipping.page(), stepping.page()) << "from " << from << " to " << to;
    ASSERT_EQ(skipping.mask(), stepping.mask());
    if (to <= from) skipping.Next();
  }
}

TEST(SelectedPages, RandomSelectionsMatchTheDefinition) {
  for (uint64_t seed = 1; seed <= 400; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937_64 rng(seed);
    const auto uniform = [&](int64_t low, int64_t high) {
      return std::uniform_int_distribution<int64_t>(low, high)(rng);
    };
    const int64_t last = uniform(0, 700);
    // Ranges may be empty, may overlap, and may lie after the query.
    const SelectionHeader header = {.kind = SelectionHeader::Kind::kList,
                                    .sink_end = uniform(0, 1) == 0 ? 0 : uniform(0, 300),
                                    .window_begin = uniform(0, 800)};
    std::vector<SelectionEntry> list;
    for (int64_t page = 0; page < 14; ++page) {
      if (uniform(0, 2) != 0) continue;
      const uint64_t mask = uniform(0, 2) == 0 ? ~uint64_t{0} : rng() & rng();
      list.push_back({.page = page, .chosen = ~uint64_t{0}, .live = mask});
    }
    ExpectWalkMatchesDefinition(header, list, last);
    ExpectSkipMatchesWalk(header, list, last, rng);
    ExpectSkipMatchesWalk({.kind = SelectionHeader::Kind::kAll}, {}, last, rng);
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace kvasir::kernels
