// Rows whose selections are watched.
#include "tests/coordinator/scheduler_fixture.h"

namespace kvasir::coordinator {
namespace {

class SchedulerObserveTest : public SchedulerTest {
 protected:
  // Steps, and returns which rows of the plan are observed.
  std::vector<bool> ObservedRows() {
    EXPECT_TRUE(Step());
    std::vector<bool> observed;
    for (const v1::StepRow& row : plan_.rows()) observed.push_back(row.observe());
    return observed;
  }
};

using ::testing::ElementsAre;

TEST_F(SchedulerObserveTest, OneRowOfTheWatchedSequenceIsObservedForEachWish) {
  Make({});
  const SequenceId first = Add(Spec(Prompt(100), 10));
  const SequenceId second = Add(Spec(Prompt(100, 2), 10));
  EXPECT_THAT(ObservedRows(), ElementsAre(false, false));
  scheduler_->Observe(second);
  scheduler_->Observe(second);
  scheduler_->Observe(SequenceId(99));
  EXPECT_THAT(ObservedRows(), ElementsAre(false, true));
  EXPECT_THAT(ObservedRows(), ElementsAre(false, false));
  scheduler_->Observe(first);
  EXPECT_THAT(ObservedRows(), ElementsAre(true, false));
  RunUntilIdle();
  EXPECT_EQ(observed_[first], 1);
  EXPECT_EQ(observed_[second], 1);
  scheduler_->Observe(first);  // it has ended
}

TEST_F(SchedulerObserveTest, AWishBeforeTheFirstStepIsKept) {
  Make({});
  const SequenceId id = Add(Spec(Prompt(100), 3));
  scheduler_->Observe(id);
  EXPECT_THAT(ObservedRows(), ElementsAre(true));
  RunUntilIdle();
  EXPECT_EQ(observed_[id], 1);
}

}  // namespace
}  // namespace kvasir::coordinator
