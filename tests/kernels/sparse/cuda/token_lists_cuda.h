// Lists of tokens that the GPU selects, compared with the CPU's: the fixture of the tests of
// tokenselect, hip and infinitehip, and how alike two selections must be.
#pragma once

#include <algorithm>
#include <cmath>
#include <gtest/gtest.h>
#include <iterator>
#include <vector>

#include "kernels/base/executor.h"
#include "tests/support/device_select.h"

namespace kvasir::kernels {

inline PageSelection SelectOnCpu(const Selector& selector, AttentionBatch& batch,
                                 const std::vector<PolicyNumbers>& numbers, int64_t capacity) {
  PageSelection selection = batch.MakeSelection(capacity);
  SerialExecutor executor;
  const absl::Status status = selector.Select(batch.ParamsForSelect(numbers), selection, executor);
  EXPECT_TRUE(status.ok()) << status;
  return selection;
}

// How alike two selections are.
struct Likeness {
  int64_t same_rows = 0;
  int64_t rows = 0;
  int64_t tokens = 0;
  int64_t other_tokens = 0;  // of `tokens`, those that only one side has
};

// Headers, numbers of tokens and entries' scores must agree; tokens are counted.
inline Likeness Compare(const Lists& found, const PageSelection& expected) {
  Likeness likeness = {.rows = expected.num_rows};
  for (int64_t row = 0; row < expected.num_rows; ++row) {
    SCOPED_TRACE(row);
    const auto r = static_cast<size_t>(row);
    const SelectionHeader& header = expected.header(row);
    EXPECT_EQ(found.headers[r].kind, header.kind);
    EXPECT_EQ(found.headers[r].sink_end, header.sink_end);
    EXPECT_EQ(found.headers[r].window_begin, header.window_begin);
    EXPECT_EQ(found.headers[r].query_position, header.query_position);
    EXPECT_EQ(found.headers[r].made_at, header.made_at);
    const auto left = TokensOf(found.headers[r], found.list(r), &SelectionEntry::live);
    const auto right = TokensOf(header, expected.list(row), &SelectionEntry::live);
    EXPECT_EQ(left.size(), right.size());
    std::vector<int64_t> both;
    std::set_intersection(left.begin(), left.end(), right.begin(), right.end(),
                          std::back_inserter(both));
    likeness.tokens += std::ssize(right);
    likeness.other_tokens += std::ssize(right) - std::ssize(both);
    likeness.same_rows += left == right ? 1 : 0;
    if (left != right) continue;
    for (int32_t i = 0; i < header.count; ++i) {
      const float score = expected.list(row)[i].score;
      if (found.list(r)[i].score == score) continue;  // infinite, too
      EXPECT_NEAR(found.list(r)[i].score, score, 1e-3 * std::abs(score) + 1e-3) << "entry " << i;
    }
  }
  return likeness;
}

// Nine rows in ten the same, and where not, as good as: a token in a thousand is another.
inline void ExpectAlike(const Likeness& likeness) {
  EXPECT_GE(likeness.same_rows * 10, likeness.rows * 9);
  EXPECT_LE(likeness.other_tokens * 1000, likeness.tokens);
  EXPECT_GT(likeness.tokens, 0) << "nothing was selected";
}

// Adds a query tile of `rows` queries from `position` on, with its numbers.
inline void AddBlock(AttentionBatch& batch, std::vector<PolicyNumbers>& numbers, int64_t slot,
                     int64_t position, int64_t rows, const PolicyNumbers& n) {
  batch.AddBlock(slot, position, rows);
  numbers.push_back(n);
}

// One suite in two files. Its shapes are listed in token_lists_cuda_test.cc.
class TokenListsCudaTest : public SelectorCudaTest {};
// More query heads of a KV head than tokenselect serves.
class LargeGroupsCudaTest : public SelectorCudaTest {};

}  // namespace kvasir::kernels
