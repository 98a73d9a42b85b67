// Places of a step's data in its table, as a GPU reads it; tested without a GPU.
#include "worker/backend/cuda/step_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <set>
#include <vector>

#include "kernels/sparse/all/all_selector.h"
#include "kernels/sparse/quest/quest_selector.h"
#include "kernels/sparse/reuse/reuse_rules.h"

namespace kvasir::worker {
namespace {

using testing::ElementsAre;

constexpr int64_t kKvHeads = 2;

// A chunk of 70 tokens read densely, a tail of two read by quest, and a decoding sequence with
// three dense first layers.
class StepTableTest : public testing::Test {
 protected:
  StepTableTest() {
    served_.resize(2);
    served_[0].selector = std::make_unique<kernels::AllSelector>();
    served_[0].dense = true;
    served_[1].selector = std::make_unique<kernels::QuestSelector>();
    prompt_.tokens.assign(72, 5);
    prompt_.prompt_size = prompt_.given_size = 72;
    prompt_.decode_begin = 70;
    prompt_.prefill = {.selector = 0, .numbers = {.window_tokens = 1}};
    prompt_.decode = {.selector = 1, .numbers = {.window_tokens = 8, .budget_tokens = 64}};
    running_.tokens.assign(1000, 7);
    running_.decode = {
        .selector = 1, .numbers = {.window_tokens = 16, .budget_tokens = 128}, .dense_layers = 3};
    const RowWork works[] = {
        {.slot = 4, .begin = 0, .num_tokens = 72, .sample = true, .sequence = &prompt_},
        {.slot = 1, .begin = 999, .num_tokens = 1, .sample = true, .sequence = &running_}};
    batch_ = MakeStepBatch(works, served_, {{.slot = 1, .block = 15, .num_tokens = 39}});
    shape_ = ShapeOf(batch_, kKvHeads);
    memory_.resize(static_cast<size_t>(LayOut(batch_, shape_, nullptr).bytes));
    table_ = LayOut(batch_, shape_, memory_.data());
    Fill(batch_, shape_, table_);
  }

  std::vector<ServedSelector> served_;
  Sequence prompt_, running_;
  StepBatch batch_;
  StepShape shape_;
  std::vector<std::byte> memory_;
  StepTable table_;
};

TEST_F(StepTableTest, BlocksOfOneQueryComeFirstAndOnceEach) {
  ASSERT_EQ(shape_.num_tiles(), std::ssize(batch_.tiles));
  EXPECT_EQ(std::set<int64_t>(shape_.order.begin(), shape_.order.end()).size(),
            batch_.tiles.size());
  EXPECT_EQ(shape_.num_single, 3);
  for (int64_t i = 0; i < shape_.num_tiles(); ++i) {
    const kernels::QueryTile& tile = table_.tiles[static_cast<size_t>(i)];
    EXPECT_EQ(tile.num_rows == 1, i < shape_.num_single) << i;
    const kernels::QueryTile& own =
        batch_.tiles[static_cast<size_t>(shape_.order[static_cast<size_t>(i)])];
    EXPECT_EQ(tile.first_row, own.first_row);
    EXPECT_EQ(tile.slot, own.slot);
  }
}

TEST_F(StepTableTest, LaunchesCoverAllBlocksWithTheirSelectors) {
  int64_t end = 0;
  for (const SelectorRange& range : shape_.ranges) {
    EXPECT_EQ(range.begin, end);
    end = range.end;
    for (int64_t i = range.begin; i < range.end; ++i) {
      const bool dense = table_.tiles[static_cast<size_t>(i)].num_rows > 1;
      EXPECT_EQ(range.served, &served_[dense ? 0 : 1]) << i;
    }
  }
  EXPECT_EQ(end, shape_.num_tiles());
  EXPECT_EQ(shape_.ranges.size(), 2u);
}

// A resumed sequence computes its generated tokens again, one by one in one step: a query reuses
// what the previous one remembered.
TEST_F(StepTableTest, QueriesOfOneMemoryGoOneBehindTheOther) {
  struct Remembered final : kernels::RememberedSelections {
    int64_t size_bytes() const override { return 0; }
  };
  served_[1].reuse = std::make_unique<kernels::IntervalRule>();
  running_.prompt_size = running_.given_size = 996;
  running_.decode_begin = 990;
  running_.memory = std::make_unique<Remembered>();
  prompt_.memory = std::make_unique<Remembered>();
  const RowWork works[] = {
      {.slot = 4, .begin = 71, .num_tokens = 1, .sample = true, .sequence = &prompt_},
      {.slot = 1, .begin = 993, .num_tokens = 6, .sample = true, .sequence = &running_}};
  prompt_.prompt_size = 70;  // it will generate
  const StepBatch batch = MakeStepBatch(works, served_);
  const StepShape shape = ShapeOf(batch, kKvHeads);
  std::vector<std::pair<int64_t, int64_t>> ranges;
  for (const SelectorRange& range : shape.ranges) ranges.push_back({range.begin, range.end});
  // One of the prompt, three of the prompt's tail and the first generated one; then one by one.
  EXPECT_THAT(ranges, ElementsAre(std::pair(0, 5), std::pair(5, 6), std::pair(6, 7)));
}

// Dense means a window over the whole context.
TEST_F(StepTableTest, NumbersFollowTheLayersThatStayDense) {
  EXPECT_THAT(shape_.number_sets, ElementsAre(0, 3));
  for (const int64_t layer : {0, 2, 3, 31}) {
    const auto numbers = table_.NumbersOfSet(shape_.NumbersFor(layer));
    ASSERT_EQ(numbers.size(), batch_.tiles.size());
    for (size_t i = 0; i < numbers.size(); ++i) {
      const bool decoding = table_.tiles[i].slot == 1;
      const int64_t window = decoding ? (layer < 3 ? 1000 : 16) : i < 3 ? 8 : 1;
      EXPECT_EQ(numbers[i].window_tokens, window) << "layer " << layer << ", block " << i;
    }
  }
}

TEST_F(StepTableTest, NumbersFollowTheWindowsOfTheModel) {
  const RowWork works[] = {
      {.slot = 1, .begin = 999, .num_tokens = 1, .sample = true, .sequence = &running_}};
  const int64_t windows[] = {50, 50, 0, 0, 50, 0};  // three layers are dense
  const StepBatch batch =
      MakeStepBatch(works, served_, {}, {.tokens = windows, .served = &served_[0]});
  const StepShape shape = ShapeOf(batch, kKvHeads);
  EXPECT_THAT(shape.number_sets, ElementsAre(0, 2, 3, 4, 5));
  std::vector<std::byte> memory(static_cast<size_t>(LayOut(batch, shape, nullptr).bytes));
  const StepTable table = LayOut(batch, shape, memory.data());
  Fill(batch, shape, table);
  const int64_t expected[] = {50, 50, 1000, 16, 50, 16};
  for (int64_t layer = 0; layer < 6; ++layer) {
    EXPECT_EQ(table.NumbersOfSet(shape.NumbersFor(layer))[0].window_tokens, expected[layer])
        << "layer " << layer;
  }
}

TEST_F(StepTableTest, TheRestIsTheBatchs) {
  EXPECT_THAT(std::vector(table_.tokens.begin(), table_.tokens.end()),
              testing::ElementsAreArray(batch_.tokens));
  EXPECT_THAT(std::vector(table_.positions.begin(), table_.positions.end()),
              testing::ElementsAreArray(batch_.positions));
  EXPECT_THAT(std::vector(table_.sampled_tokens.begin(), table_.sampled_tokens.end()),
              ElementsAre(71, 72));
  ASSERT_EQ(table_.appends.size(), batch_.appends.size());
  EXPECT_EQ(table_.appends.back().first_position, 999);
  ASSERT_EQ(table_.truncations.size(), 1u);
  EXPECT_EQ(table_.truncations[0].num_tokens, 39);
  ASSERT_EQ(table_.headers.size(), batch_.tiles.size() * kKvHeads);
  for (size_t row = 0; row < table_.headers.size(); ++row) {
    EXPECT_EQ(table_.headers[row].kind, kernels::SelectionHeader::Kind::kAll);
    EXPECT_EQ(table_.headers[row].query_position, table_.tiles[row / kKvHeads].first_position);
  }
}

// No array begins within another: kernels read all of them at once.
TEST_F(StepTableTest, ArraysDoNotOverlap) {
  const auto range = [](const auto& array) {
    const auto* begin = reinterpret_cast<const std::byte*>(array.data());
    return std::pair(begin, begin + array.size_bytes());
  };
  const std::pair<const std::byte*, const std::byte*> arrays[] = {
      range(table_.tokens),  range(table_.positions),  range(table_.sampled_tokens),
      range(table_.appends), range(table_.tiles),      range(table_.numbers),
      range(table_.headers), range(table_.truncations)};
  const std::byte* end = memory_.data();
  for (const auto& [from, to] : arrays) {
    EXPECT_GE(from, end);
    EXPECT_LT(from, to);
    end = to;
  }
  EXPECT_LE(end, memory_.data() + memory_.size());
}

TEST_F(StepTableTest, ResultsHaveRoomForAllThatKernelsLeaveBehind) {
  constexpr int64_t kLayers = 3, kSlots = 40;
  const int64_t bytes = LayOutResults(batch_, shape_, kLayers, kSlots, nullptr).bytes;
  std::vector<std::byte> memory(static_cast<size_t>(bytes));
  const DeviceStepOutputs results = LayOutResults(batch_, shape_, kLayers, kSlots, memory.data());
  EXPECT_EQ(results.counts.size(), kLayers * batch_.tiles.size() * kKvHeads);
  EXPECT_EQ(results.finite.size(), batch_.tokens.size());
  EXPECT_EQ(results.faults.size(), static_cast<size_t>(kSlots));
  const auto* const finite = reinterpret_cast<const std::byte*>(results.finite.data());
  const auto* const faults = reinterpret_cast<const std::byte*>(results.faults.data());
  EXPECT_LE(reinterpret_cast<const std::byte*>(results.counts.data() + results.counts.size()),
            finite);
  EXPECT_LE(finite + results.finite.size(), faults);
  EXPECT_LE(faults + results.faults.size(), memory.data() + memory.size());
}

}  // namespace
}  // namespace kvasir::worker
