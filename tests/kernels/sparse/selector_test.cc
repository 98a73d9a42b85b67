#include <bit>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <memory>
#include <string>
#include <vector>

#include "kernels/sparse/common/selection_accounting.h"
#include "kernels/sparse/common/stages.h"
#include "kernels/sparse/methods.h"
#include "kernels/sparse/policy.h"
#include "tests/support/attention_batch.h"

namespace kvasir::kernels {
namespace {

using Kind = SelectionHeader::Kind;

// Widens the window to the least that the selector needs, so that the cases fit every selector.
PolicyNumbers WithWindow(const Selector& selector, PolicyNumbers numbers) {
  numbers.window_tokens = std::max(numbers.window_tokens, selector.MinWindowTokens());
  return numbers;
}

// Rules that hold for every selector in the list. A new method is found here by itself.
class SelectorTest : public ::testing::TestWithParam<std::string> {
 protected:
  std::unique_ptr<Selector> selector_ = MakeSelector(GetParam()).value();

  PolicyNumbers SomeNumbers() const { return WithWindow(*selector_, {4, 64, 256}); }

  PageSelection Select(AttentionBatch& batch, const std::vector<PolicyNumbers>& numbers) {
    int64_t capacity = 0;
    for (size_t i = 0; i < numbers.size(); ++i) {
      const QueryTile& tile = batch.blocks()[i];
      capacity = std::max(capacity,
                          selector_->MaxEntries(numbers[i], tile.first_position + tile.num_rows));
    }
    PageSelection selection = batch.MakeSelection(capacity);
    SerialExecutor executor;
    const absl::Status status =
        selector_->Select(batch.ParamsForSelect(numbers), selection, executor);
    EXPECT_TRUE(status.ok()) << status;
    return selection;
  }
};

std::vector<std::string> Names() {
  std::vector<std::string> names;
  for (const SelectorMethod& method : SelectorMethods()) names.emplace_back(method.name.data());
  return names;
}

INSTANTIATE_TEST_SUITE_P(Methods, SelectorTest, ::testing::ValuesIn(Names()),
                         [](const auto& param) { return param.param; });

struct Case {
  int64_t first_position;
  int64_t num_rows;
  PolicyNumbers numbers;
};

std::vector<Case> Cases(const Selector& selector) {
  std::vector<Case> cases;
  for (const int64_t first : {0, 1, 63, 64, 1000, 2047, 2048}) {
    for (const int64_t rows : {1, 16}) {
      if (first % kPageTokens + rows > kPageTokens) continue;
      for (const PolicyNumbers& numbers :
           {PolicyNumbers{0, 1, 0}, PolicyNumbers{4, 64, 0}, PolicyNumbers{0, 1, 1},
            PolicyNumbers{70, 130, 192}, PolicyNumbers{128, 512, 700}, PolicyNumbers{5000, 1, 64},
            PolicyNumbers{64, 5000, 64}}) {
        cases.push_back({first, rows, WithWindow(selector, numbers)});
      }
    }
  }
  return cases;
}

AttentionBatch MakeBatch(const std::vector<Case>& cases, uint64_t seed) {
  AttentionBatch batch({.kv = DType::kBFloat16, .head_dim = 64}, 1, 2176, seed);
  batch.FillContext(0, 2176);
  for (const Case& c : cases) batch.AddBlock(0, c.first_position, c.num_rows);
  return batch;
}

std::vector<PolicyNumbers> NumbersOf(const std::vector<Case>& cases) {
  std::vector<PolicyNumbers> numbers;
  for (const Case& c : cases) numbers.push_back(c.numbers);
  return numbers;
}

TEST_P(SelectorTest, ListsAreAscendingUniqueCausalAndWithinTheBudget) {
  const std::vector<Case> cases = Cases(*selector_);
  AttentionBatch batch = MakeBatch(cases, 51);
  const PageSelection selection = Select(batch, NumbersOf(cases));
  for (int64_t row = 0; row < selection.num_rows; ++row) {
    const Case& c = cases[static_cast<size_t>(row / 2)];
    const SelectionHeader& header = selection.header(row);
    SCOPED_TRACE(testing::Message()
                 << "first " << c.first_position << " rows " << c.num_rows << " sink "
                 << c.numbers.sink_tokens << " window " << c.numbers.window_tokens << " budget "
                 << c.numbers.budget_tokens);
    EXPECT_EQ(header.query_position, c.first_position);
    EXPECT_EQ(header.made_at, c.first_position);
    const int64_t context = c.first_position + c.num_rows;
    if (context <= c.numbers.sink_tokens + c.numbers.window_tokens + c.numbers.budget_tokens) {
      if (c.numbers.budget_tokens == 0) {
        EXPECT_EQ(header.kind, Kind::kAll) << "rule R2";
      }
      if (header.kind == Kind::kAll) continue;
    }
    if (GetParam() == "all") {
      EXPECT_EQ(header.kind, Kind::kAll);
      continue;
    }
    ASSERT_EQ(header.kind, Kind::kList);
    EXPECT_EQ(header.window_begin,
              std::max<int64_t>(0, c.first_position - c.numbers.window_tokens + 1));
    EXPECT_EQ(header.sink_end, std::min(c.numbers.sink_tokens, header.window_begin));
    int64_t chosen = 0;
    int64_t previous = -1;
    for (int32_t i = 0; i < header.count; ++i) {
      const SelectionEntry& entry = selection.list(row)[i];
      EXPECT_GT(entry.page, previous);
      previous = entry.page;
      EXPECT_NE(entry.chosen, 0u);
      EXPECT_EQ(entry.live, entry.chosen);
      EXPECT_LT(entry.page * kPageTokens, c.first_position);
      EXPECT_GT((entry.page + 1) * kPageTokens, header.sink_end);
      chosen += std::popcount(entry.chosen);
    }
    EXPECT_LE(chosen, c.numbers.budget_tokens + kPageTokens - 1) << "rounded up to blocks";
  }
}

TEST_P(SelectorTest, EveryQuerySeesItsOwnTokenSinkAndWindow) {
  const std::vector<Case> cases = Cases(*selector_);
  AttentionBatch batch = MakeBatch(cases, 52);
  const PageSelection selection = Select(batch, NumbersOf(cases));
  for (int64_t row = 0; row < selection.num_rows; ++row) {
    const Case& c = cases[static_cast<size_t>(row / 2)];
    const int64_t last = c.first_position + c.num_rows - 1;
    std::vector<bool> attended(static_cast<size_t>(last + 1));
    for (SelectedPages walk(selection.header(row), selection.list(row), last); walk.valid();
         walk.Next()) {
      for (int64_t t = 0; t < kPageTokens; ++t) {
        if ((walk.mask() >> t & 1) == 0) continue;
        ASSERT_LE(walk.page() * kPageTokens + t, last);
        attended[static_cast<size_t>(walk.page() * kPageTokens + t)] = true;
      }
    }
    for (int64_t position = c.first_position; position <= last; ++position) {
      for (int64_t token = 0; token <= position; ++token) {
        if (token >= c.numbers.sink_tokens && token <= position - c.numbers.window_tokens) continue;
        ASSERT_TRUE(attended[static_cast<size_t>(token)])
            << "query " << position << " misses token " << token;
      }
    }
  }
}

TEST_P(SelectorTest, ARowDoesNotDependOnItsNeighboursOrThreads) {
  const std::vector<Case> cases = Cases(*selector_);
  AttentionBatch batch = MakeBatch(cases, 53);
  const PageSelection together = Select(batch, NumbersOf(cases));
  std::vector<SelectionHeader> headers(together.headers, together.headers + together.num_rows);
  std::vector<SelectionEntry> entries(together.entries,
                                      together.entries + together.num_rows * together.capacity);
  for (size_t i = 0; i < cases.size(); i += 5) {
    AttentionBatch alone({.kv = DType::kBFloat16, .head_dim = 64}, 1, 2176, 53);
    alone.FillContext(0, 2176);
    alone.AddBlock(0, cases[i].first_position, cases[i].num_rows);
    const int64_t first_row = batch.blocks()[i].first_row;
    for (int64_t r = 0; r < cases[i].num_rows; ++r) {
      for (int64_t head = 0; head < alone.heads(); ++head) {
        std::copy_n(batch.q(first_row + r, head), 64, alone.q(r, head));
      }
    }
    const PageSelection selection = Select(alone, {cases[i].numbers});
    for (int64_t head = 0; head < 2; ++head) {
      const size_t row = i * 2 + static_cast<size_t>(head);
      ASSERT_EQ(selection.header(head).count, headers[row].count);
      for (int32_t j = 0; j < headers[row].count; ++j) {
        const SelectionEntry& expected =
            entries[row * static_cast<size_t>(together.capacity) + static_cast<size_t>(j)];
        EXPECT_EQ(selection.list(head)[j].page, expected.page);
        EXPECT_EQ(selection.list(head)[j].chosen, expected.chosen);
      }
    }
  }
}

TEST_P(SelectorTest, CountsNoAccesses) {
  AttentionBatch batch = MakeBatch({{2048, 1, SomeNumbers()}}, 54);
  Select(batch, {SomeNumbers()});
  for (int64_t block = 0; block < 34; ++block) {
    EXPECT_EQ(batch.kv().last_touched(0, block, AttentionBatch::kLayer, 0), 0u);
  }
}

// Those that read keys say so; the others go by digests.
TEST_P(SelectorTest, AnAbsentPageIsAFaultOrNotNeeded) {
  AttentionBatch batch = MakeBatch({{2048, 1, SomeNumbers()}}, 55);
  for (int64_t block = 0; block < 32; ++block) {
    batch.kv().SetTier(0, block, AttentionBatch::kLayer, 0, PageTier::kAbsent);
  }
  Select(batch, {SomeNumbers()});
  EXPECT_EQ(batch.fault(0), GetParam() == "tokenselect" || GetParam() == "hip" ? 1 : 0);
}

TEST_P(SelectorTest, RejectsWhatDoesNotFit) {
  AttentionBatch batch = MakeBatch({{2048, 1, SomeNumbers()}}, 56);
  const std::vector<PolicyNumbers> good = {SomeNumbers()};
  PageSelection selection = batch.MakeSelection(selector_->MaxEntries(good[0], 2049));
  SerialExecutor executor;
  const auto code = [&](const std::vector<PolicyNumbers>& numbers, auto change) {
    SelectParams p = batch.ParamsForSelect(numbers);
    change(p);
    return selector_->Select(p, selection, executor).code();
  };
  const auto nothing = [](SelectParams&) {};
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  EXPECT_EQ(code(good, nothing), absl::StatusCode::kOk);
  EXPECT_EQ(code({}, nothing), kInvalid);
  EXPECT_EQ(code({{-1, 64, 256}}, nothing), kInvalid);
  EXPECT_EQ(code({{4, selector_->MinWindowTokens() - 1, 256}}, nothing), kInvalid);
  EXPECT_EQ(code({{4, 64, -1}}, nothing), kInvalid);
  EXPECT_EQ(code(good, [](SelectParams& p) { p.layer = 9; }), kInvalid);
  EXPECT_EQ(code(good, [](SelectParams& p) { p.scratch = nullptr; }), kInvalid);
  EXPECT_EQ(code(good, [](SelectParams& p) { p.kv.layout.head_dim = 32; }), kInvalid);
  EXPECT_EQ(code(good, [](SelectParams& p) { p.faults = {}; }), kInvalid);
  if (selection.capacity > 0) {
    --selection.capacity;
    EXPECT_EQ(code(good, nothing), kInvalid);
    ++selection.capacity;
  }
  selection.num_rows = 1;
  EXPECT_EQ(code(good, nothing), kInvalid);
}

TEST(MakeSelector, UnknownNamesListTheKnownOnes) {
  const absl::Status status = MakeSelector("qest").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(),
            "unknown selector 'qest'; the selectors are all, streaming, quest, "
            "tokenselect, hip, infinitehip");
}

TEST(MakeSelector, UnknownOptionsListTheKnownOnes) {
  EXPECT_EQ(MakeSelector("hip", {{"preset", "3k"}}).status().message(),
            "this selector has no option 'preset', nor any other");
  EXPECT_EQ(MakeSelector("infinitehip", {{"presets", "3k"}}).status().message(),
            "infinitehip has no option 'presets'; its options are preset, probe, scope");
  EXPECT_EQ(MakeSelector("infinitehip", {{"preset", "4k"}}).status().message(),
            "infinitehip: preset '4k' is unknown; there are 3k, 3k-fast, 3k-flash, 5k");
  EXPECT_EQ(MakeSelector("infinitehip", {{"probe", "last"}}).status().message(),
            "infinitehip: probe 'last' is unknown; there are digest, centre, first");
}

TEST(InfiniteHip, TheDigestProbeNeedsDigests) {
  AttentionBatch batch = MakeBatch({{2048, 1, {}}}, 58);
  const std::unique_ptr<Selector> selector = MakeSelector("infinitehip").value();
  const std::vector<PolicyNumbers> numbers = {{4, 512, 256}};
  PageSelection selection = batch.MakeSelection(selector->MaxEntries(numbers[0], 2049));
  SerialExecutor executor;
  for (const bool bounds : {true, false}) {
    SelectParams p = batch.ParamsForSelect(numbers);
    (bounds ? p.kv.bounds : p.kv.key_codes) = nullptr;
    EXPECT_EQ(selector->Select(p, selection, executor).code(),
              absl::StatusCode::kFailedPrecondition);
  }
}

TEST(CountPages, AttendedAndSkippedAddUpToTheDensePages) {
  for (const SelectorMethod& method : SelectorMethods()) {
    const std::unique_ptr<Selector> selector = method.make({}).value();
    AttentionBatch batch = MakeBatch({{2100, 1, {}}}, 57);
    const std::vector<PolicyNumbers> numbers = {
        WithWindow(*selector, {.sink_tokens = 100, .window_tokens = 60, .budget_tokens = 512})};
    PageSelection selection = batch.MakeSelection(selector->MaxEntries(numbers[0], 2101));
    SerialExecutor executor;
    ASSERT_TRUE(selector->Select(batch.ParamsForSelect(numbers), selection, executor).ok());
    const PageCounts counts =
        CountPages(selection.header(0), selection.list(0), 2100, selector->skip_reason());
    EXPECT_EQ(counts.total, 33);
    EXPECT_EQ(counts.attended + counts.selected_out + counts.window, counts.total);
    if (method.name == "all") {
      EXPECT_EQ(counts.attended, 33);
    } else if (method.name == "streaming") {
      // Sink: pages 0 and 1; window 2041..2100: pages 31 and 32.
      EXPECT_EQ(counts, (PageCounts{33, 4, 0, 29}));
    } else if (method.name == "quest") {
      EXPECT_EQ(counts.window, 0);
      EXPECT_LE(counts.attended, 4 + 8);
      EXPECT_GE(counts.attended, 8 + 2) << "candidates may share pages with sink and window";
    }
  }
}

}  // namespace
}  // namespace kvasir::kernels
