// A worker's metrics of steps on /metrics.
#include "worker/metrics.h"

#include <algorithm>
#include <chrono>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "prometheus/registry.h"
#include "prometheus/text_serializer.h"

#include "tests/worker/random_model_fixture.h"
#include "tests/worker/test_worker.h"

namespace kvasir::worker {
namespace {

class MetricsTest : public RandomModelFixture {
 protected:
  MetricsTest() { metrics_.JoinGroup({.model_name = "random", .policies = {"default"}}); }

  // Makes a step that starts sequences in some slots, and has rows of some that fail.
  void Record(const std::vector<uint32_t>& starting, const std::vector<uint32_t>& failing) {
    v1::StepPlan plan;
    for (const uint32_t slot : starting) plan.add_starts()->set_slot(slot);
    v1::StepReply reply;
    for (uint32_t slot = 0; slot < 4; ++slot) {
      plan.add_rows()->set_slot(slot);
      v1::RowResult& result = *reply.add_results();
      result.set_slot(slot);
      if (std::find(failing.begin(), failing.end(), slot) == failing.end()) continue;
      result.set_error_code(static_cast<int32_t>(absl::StatusCode::kDataLoss));
    }
    metrics_.RecordStep(worker_.engine(), plan, reply);
  }
  std::string Text() const {
    std::ostringstream text;
    prometheus::TextSerializer().Serialize(text, registry_.Collect());
    return text.str();
  }
  testing::AssertionResult HasFailedRows(int count) const {
    const std::string line =
        "kvasir_failed_rows_total{code=\"DATA_LOSS\",model_name=\"random\",rank=\"0\"} " +
        std::to_string(count) + "\n";
    if (Text().find(line) != std::string::npos) return testing::AssertionSuccess();
    return testing::AssertionFailure() << "no line " << line << " in " << Text();
  }

  TestWorker worker_{*model_};
  prometheus::Registry registry_;
  WorkerMetrics metrics_{registry_};
};

// The row that was planned before the failure was answered must not count as another failure.
TEST_F(MetricsTest, ASequenceThatFailedCountsOnce) {
  Record({0, 1, 2, 3}, {1});
  EXPECT_TRUE(HasFailedRows(1));
  Record({}, {1, 2});
  EXPECT_TRUE(HasFailedRows(2));
  Record({1}, {2});
  EXPECT_TRUE(HasFailedRows(2));
  Record({}, {1, 2});
  EXPECT_TRUE(HasFailedRows(3)) << "another sequence";
}

// Nobody waits between the end of all requests and the start of others.
TEST_F(MetricsTest, AGapBetweenStepsCountsWhereARowGoesOn) {
  const std::string count = "kvasir_step_gap_seconds_count{model_name=\"random\",rank=\"0\"} ";
  Record({0, 1, 2, 3}, {});
  EXPECT_THAT(Text(), testing::HasSubstr(count + "0\n"));
  Record({}, {});
  EXPECT_THAT(Text(), testing::HasSubstr(count + "1\n"));
  Record({1}, {});
  EXPECT_THAT(Text(), testing::HasSubstr(count + "2\n"));
}

TEST_F(MetricsTest, AGapIsTheTimeBetweenTwoSteps) {
  constexpr std::chrono::milliseconds kPause(20);
  TestCoordinator coordinator({});
  coordinator.Add(MakeSparseRequest(std::vector<uint32_t>(10, 1), 0));
  const auto step = [&] {
    const v1::StepPlan plan = coordinator.NextPlan();
    const absl::StatusOr<v1::StepReply> reply = worker_.engine().Step(plan);
    ASSERT_TRUE(reply.ok()) << reply.status();
    coordinator.Apply(plan, *reply);
  };
  step();
  std::this_thread::sleep_for(kPause);
  step();
  EXPECT_GE(worker_.engine().gap_s(), std::chrono::duration<double>(kPause).count());
}

}  // namespace
}  // namespace kvasir::worker
