#include "worker/batch/step_batch.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "kernels/sparse/policy.h"

namespace kvasir::worker {
namespace {

using kernels::QueryTile;
using testing::ElementsAre;

class StepBatchTest : public testing::Test {
 protected:
  StepBatchTest() {
    for (const char* name : {"all", "quest"}) {
      selectors_.push_back({.selector = kernels::MakeSelector(name).value(),
                            .pruner = nullptr,
                            .terminator = nullptr,
                            .dense = std::string(name) == "all"});
    }
  }
  // 200 tokens of prompt, whose last 20 select one by one; tokens are their own positions.
  static Sequence MakeSequence(int64_t prefill, int64_t decode) {
    Sequence sequence;
    for (int32_t i = 0; i < 210; ++i) sequence.tokens.push_back(i);
    sequence.prompt_size = 200;
    sequence.decode_begin = 180;
    sequence.prefill.selector = prefill;
    sequence.decode.selector = decode;
    return sequence;
  }
  // "slot: [position, end) at row"
  static std::vector<std::string> Describe(const std::vector<QueryTile>& tiles) {
    std::vector<std::string> text;
    for (const QueryTile& b : tiles) {
      text.push_back(absl::StrCat(b.slot, ": [", b.first_position, ", ",
                                  b.first_position + b.num_rows, ") at ", b.first_row));
    }
    return text;
  }

  std::vector<ServedSelector> selectors_;
};

TEST_F(StepBatchTest, CutsAtAbsoluteMultiplesOf64AndTheTailOneByOne) {
  const Sequence sequence = MakeSequence(0, 0);
  const std::vector<RowWork> rows = {
      {.slot = 3, .begin = 64, .num_tokens = 119, .sequence = &sequence}};
  const StepBatch batch = MakeStepBatch(rows, selectors_);
  EXPECT_THAT(Describe(batch.tiles),
              ElementsAre("3: [64, 128) at 0", "3: [128, 180) at 64", "3: [180, 181) at 116",
                          "3: [181, 182) at 117", "3: [182, 183) at 118"));
  EXPECT_THAT(Describe(batch.appends), ElementsAre("3: [64, 128) at 0", "3: [128, 183) at 64"));
  EXPECT_EQ(batch.tokens.front(), 64);
  EXPECT_EQ(batch.positions.back(), 182);
  EXPECT_TRUE(batch.sampled_tokens.empty());
}

TEST_F(StepBatchTest, GroupsBySelectorAndAppendsInOrderOfPosition) {
  const Sequence quest_then_all = MakeSequence(1, 0), decoding = MakeSequence(0, 1);
  const std::vector<RowWork> rows = {
      {.slot = 0, .begin = 128, .num_tokens = 54, .sequence = &quest_then_all},
      {.slot = 1, .begin = 205, .num_tokens = 1, .sample = true, .sequence = &decoding}};
  const StepBatch batch = MakeStepBatch(rows, selectors_);
  EXPECT_THAT(Describe(batch.tiles), ElementsAre("0: [180, 181) at 52", "0: [181, 182) at 53",
                                                 "0: [128, 180) at 0", "1: [205, 206) at 54"));
  ASSERT_EQ(batch.groups.size(), 2u);
  EXPECT_TRUE(batch.groups[0].served->dense);
  EXPECT_EQ(batch.groups[0].end, 2);
  EXPECT_EQ(batch.groups[1].end, 4);
  EXPECT_THAT(Describe(batch.appends), ElementsAre("0: [128, 182) at 0", "1: [205, 206) at 54"));
  EXPECT_THAT(batch.row_begins, ElementsAre(0, 54, 55));
  EXPECT_THAT(batch.sampled_tokens, ElementsAre(54));
  EXPECT_THAT(batch.sampled_rows, ElementsAre(1));
  EXPECT_EQ(batch.infos[2].phase, Phase::kPrefill);
  EXPECT_EQ(batch.infos[3].phase, Phase::kDecode);
}

// In the second of three layers the model has a window, in which both policies count for nothing.
TEST_F(StepBatchTest, LayersWithAWindowOfTheModelHaveOneGroupAndItsNumbers) {
  Sequence quest_then_all = MakeSequence(1, 0);
  quest_then_all.prefill.dense_layers = 3;
  const std::vector<RowWork> rows = {
      {.slot = 0, .begin = 128, .num_tokens = 54, .sequence = &quest_then_all}};
  const ServedSelector streaming = {.selector = kernels::MakeSelector("streaming").value()};
  const int64_t windows[] = {0, 97, 0};
  const StepBatch batch =
      MakeStepBatch(rows, selectors_, {}, {.tokens = windows, .served = &streaming});
  for (const int64_t layer : {0, 2}) {
    EXPECT_EQ(WindowOfLayer(batch, layer), 0);
    EXPECT_EQ(GroupsInLayer(batch, layer).size(), 2u);
  }
  EXPECT_EQ(WindowOfLayer(batch, 1), 97);
  const auto groups = GroupsInLayer(batch, 1);
  ASSERT_EQ(groups.size(), 1u);
  EXPECT_EQ(groups[0].served, &streaming);
  EXPECT_EQ(groups[0].begin, 0);
  EXPECT_EQ(groups[0].end, std::ssize(batch.tiles));
  for (int64_t b = 0; b < std::ssize(batch.tiles); ++b) {
    const kernels::PolicyNumbers numbers = NumbersInLayer(batch, b, 1);
    EXPECT_EQ(numbers.sink_tokens, 0);
    EXPECT_EQ(numbers.window_tokens, 97);
    EXPECT_EQ(numbers.budget_tokens, 0);
  }
  EXPECT_EQ(SelectionCapacity(batch, 1), 0);
}

}  // namespace
}  // namespace kvasir::worker
