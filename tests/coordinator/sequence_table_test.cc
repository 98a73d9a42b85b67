#include "coordinator/scheduling/sequence_table.h"

#include <memory>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "coordinator/scheduling/block_budget.h"

namespace kvasir::coordinator {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using State = Sequence::State;

class SequenceTableTest : public ::testing::Test {
 protected:
  Sequence& Add(int64_t id) {
    SequenceSpec spec = {.id = SequenceId(id),
                         .prompt = std::vector<int32_t>(100, 1),
                         .max_tokens = 5,
                         .sampling = {},
                         .policy = {},
                         .tenant = {},
                         .arrival = {}};
    table_.Add(std::make_unique<Sequence>(std::move(spec), kvstore::PrefixHash()));
    return *table_.Find(SequenceId(id));
  }
  // With one block and a reservation for one more.
  Sequence& AddRunning(int64_t id) {
    Sequence& sequence = Add(id);
    sequence.reservation = blocks_.Reserve(2);
    sequence.TakeBlock();
    table_.Run(sequence);
    return sequence;
  }
  void TearDown() override { EXPECT_EQ(table_.CheckIntegrity(), absl::OkStatus()); }

  const SchedulerOptions options_;
  BlockBudget blocks_{kvstore::PrefixIndex::Create(10)};
  PrefillRate prefill_rate_;
  RestoreBook restores_{options_, blocks_.index(), prefill_rate_};
  SequenceTable table_{/*num_slots=*/3, restores_};
};

TEST_F(SequenceTableTest, ASequenceThatGoesBackToTheQueueHoldsNothing) {
  Add(0);
  Sequence& sequence = AddRunning(1);
  EXPECT_EQ(sequence.state, State::kRunning);
  table_.BackToQueue(sequence);
  EXPECT_EQ(sequence.state, State::kWaiting);
  EXPECT_EQ(sequence.slot, -1);
  EXPECT_THAT(sequence.blocks, IsEmpty());
  EXPECT_EQ(blocks_.unreserved(), 10);
  EXPECT_EQ(table_.waiting().front(), &sequence);
}

// As when the group is lost.
TEST_F(SequenceTableTest, AllSequencesArePreemptedAndLeaveInTheOrderOfArrival) {
  Sequence& first = Add(1);
  Sequence& second = AddRunning(2);
  Sequence& third = Add(3);
  third.reservation = blocks_.Reserve(2);
  table_.Restore(third, {.links = {kvstore::StoredLink()}, .stored = 1}, TimePoint());
  Sequence& fourth = AddRunning(4);
  EXPECT_EQ(table_.num_holding(), 3);
  for (Sequence* sequence : {&second, &third, &fourth}) table_.Preempt(*sequence);
  EXPECT_EQ(table_.num_holding(), 0);
  EXPECT_EQ(restores_.CheckIntegrity(), absl::OkStatus());
  EXPECT_EQ(blocks_.unreserved(), 10);
  const std::vector<std::unique_ptr<Sequence>> all = table_.TakeAll();
  ASSERT_EQ(all.size(), 4u);
  size_t i = 0;
  for (const Sequence* sequence : {&first, &second, &third, &fourth}) {
    EXPECT_EQ(all[i++].get(), sequence);
    EXPECT_EQ(sequence->is_planned, sequence != &first);
  }
  EXPECT_EQ(second.preemptions, 1);
  EXPECT_EQ(third.preemptions, 0);  // it had not run
}

TEST_F(SequenceTableTest, OneThatEndsWhileItRunsKeepsItsBlocksUntilItIsFreed) {
  table_.End(AddRunning(1), SequenceTable::Blocks::kKeep);
  table_.End(Add(2), SequenceTable::Blocks::kKeep);
  EXPECT_EQ(table_.Find(SequenceId(1)), nullptr);
  ASSERT_EQ(table_.ended().size(), 1u);
  EXPECT_EQ(table_.ended()[0].sequence->state, State::kEnded);
  EXPECT_EQ(blocks_.reserved(), 0);
  EXPECT_EQ(blocks_.unreserved(), 9);
  EXPECT_EQ(table_.CheckIntegrity(), absl::OkStatus());
  table_.FreeEnded();
  EXPECT_EQ(blocks_.unreserved(), 10);
}

TEST_F(SequenceTableTest, AStartThatIsTakenBackAfterTheEndFreesTheSlot) {
  table_.End(AddRunning(1), SequenceTable::Blocks::kKeep);
  table_.UndoStartOfEnded(SequenceId(1));
  EXPECT_EQ(table_.ended()[0].sequence->slot, -1);
  table_.FreeEnded();
}

TEST_F(SequenceTableTest, RunningSequencesAreByAgeAndHaveDifferentSlots) {
  Sequence& young = AddRunning(7);
  Sequence& old = AddRunning(5);
  EXPECT_THAT(table_.running(), ElementsAre(&old, &young));
  EXPECT_NE(old.slot, young.slot);
}

}  // namespace
}  // namespace kvasir::coordinator
