#include "kernels/plans/plan_log.h"

#include <atomic>
#include <set>
#include <string>
#include <utility>

#include "kernels/base/mutex.h"

namespace kvasir::kernels {
namespace {

std::atomic<PlanSink> sink = nullptr;

struct Told {
  Mutex mu;
  std::set<std::pair<std::string, std::string>> plans GUARDED_BY(mu);
};
Told& AllTold() {
  static auto* const told = new Told;  // also for threads that outlive statics
  return *told;
}

}  // namespace

void SetPlanSink(PlanSink to) { sink = to; }

bool PlansAreTold() { return sink.load(std::memory_order_relaxed) != nullptr; }

void TellPlanText(absl::string_view op, absl::string_view plan) {
  const PlanSink to = sink;
  if (to == nullptr) return;
  Told& told = AllTold();
  MutexLock lock(told.mu);
  if (told.plans.emplace(op, plan).second) to(op, plan);
}

}  // namespace kvasir::kernels
