// A sink gets every plan of an op once, and nothing without a sink.
#include "kernels/plans/plan_log.h"

#include <gtest/gtest.h>
#include <string>
#include <vector>

namespace kvasir::kernels {
namespace {

std::vector<std::string>& Told() {
  static std::vector<std::string> told;
  return told;
}

void Keep(absl::string_view op, absl::string_view plan) {
  Told().push_back(std::string(op) + ": " + std::string(plan));
}

TEST(PlanLog, TellsEachPlanOfAnOpOnce) {
  TellPlan("gather", 1);
  EXPECT_FALSE(PlansAreTold());
  SetPlanSink(Keep);
  for (const int plan : {1, 2, 1}) TellPlan("gather", plan);
  TellPlan("scatter", 1);
  SetPlanSink(nullptr);
  TellPlan("scatter", 3);
  EXPECT_EQ(Told(), (std::vector<std::string>{"gather: 1", "gather: 2", "scatter: 1"}));
}

}  // namespace
}  // namespace kvasir::kernels
