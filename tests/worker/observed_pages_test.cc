#include "worker/batch/observed_pages.h"

#include <tuple>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/worker/engine_fixture.h"

namespace kvasir::worker {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;

TEST(ObservedPagesTest, ColumnsAreRunsOfPagesAndNoMoreThanFit) {
  for (const auto& [pages, columns, per_column] :
       {std::tuple(1, 1, 1), {128, 128, 1}, {129, 65, 2}, {256, 128, 2}, {16384, 128, 128}}) {
    const ObservedPages observed = ObservedPages::Of(pages, 3, 2);
    EXPECT_EQ(observed.num_columns, columns) << pages;
    EXPECT_EQ(observed.pages_per_column, per_column) << pages;
    EXPECT_EQ(std::ssize(observed.counts), 3 * columns) << pages;
  }
  ObservedPages observed = ObservedPages::Of(129, 2, 1);
  observed.Add(0, 0);
  observed.Add(0, 1);
  observed.Add(1, 128);
  EXPECT_EQ(observed.counts.front(), 2u);
  EXPECT_EQ(observed.counts.back(), 1u);
}

class ObservedRowTest : public EngineTest {
 protected:
  // Runs three steps of a request of 500 tokens, observed or not; returns what the last one tells.
  v1::RowResult Answer(uint32_t policy, bool observe) {
    TestWorker worker(*model_);
    TestCoordinator coordinator({.chunk = 512});
    TestRequest request = MakeRequest(500, policy);
    request.tail_tokens = 0;
    coordinator.Add(request);
    v1::RowResult last;
    for (int step = 0; step < 3; ++step) {
      v1::StepPlan plan = coordinator.NextPlan();
      for (v1::StepRow& row : *plan.mutable_rows()) row.set_observe(observe);
      const absl::StatusOr<v1::StepReply> reply = worker.engine().Step(plan);
      EXPECT_TRUE(reply.ok()) << reply.status();
      coordinator.Apply(plan, *reply);
      last = reply->results(0);
    }
    return last;
  }
};

TEST_F(ObservedRowTest, TellsThePagesOfEachLayer) {
  const auto heads = static_cast<uint32_t>(model_->transformer().options().config.num_kv_heads);
  const v1::SelectionMap all = Answer(kAll, true).selections();
  EXPECT_EQ(all.num_heads(), heads);
  EXPECT_EQ(all.num_columns(), all.num_pages());
  EXPECT_EQ(all.counts_size(), 3 * static_cast<int>(all.num_pages()));
  EXPECT_THAT(all.counts(), Each(heads));
  const v1::SelectionMap window = Answer(kStreaming, true).selections();  // sink 16, window 70
  for (int layer = 0; layer < 3; ++layer) {
    const auto begin = window.counts().begin() + layer * static_cast<int>(window.num_columns());
    EXPECT_THAT(std::vector<uint32_t>(begin, begin + 8),
                ElementsAre(heads, 0, 0, 0, 0, 0, heads, heads));
  }
}

TEST_F(ObservedRowTest, OthersTellNothing) { EXPECT_FALSE(Answer(kAll, false).has_selections()); }

}  // namespace
}  // namespace kvasir::worker
