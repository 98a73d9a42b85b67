// Says which kernel serves a shape. An op that has several kernels chooses by a plan: a plain
// struct that a host function makes from shapes and facts of the device, so that choices can be
// tested without a GPU. The op tells each plan here, and a program that wants to know them (a
// worker at log level debug) gets each text once. Thread-safe.
#pragma once

#include <sstream>

#include "absl/strings/string_view.h"

namespace kvasir::kernels {

using PlanSink = void (*)(absl::string_view op, absl::string_view plan);

// Null, as at start: nothing is told, and TellPlan costs a load.
void SetPlanSink(PlanSink sink);
bool PlansAreTold();

// Calls the sink unless it was called with the same text of the op before.
void TellPlanText(absl::string_view op, absl::string_view plan);

template <typename Plan>
void TellPlan(absl::string_view op, const Plan& plan) {
  if (!PlansAreTold()) return;
  std::ostringstream text;
  text << plan;
  TellPlanText(op, text.str());
}

}  // namespace kvasir::kernels
