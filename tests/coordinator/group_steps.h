// Plans for tests of a worker group, and a step of one.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"

#include "coordinator/group/worker_group.h"
#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {

// An empty plan: the ranks' reply is empty.
inline v1::StepPlan EmptyPlan(uint64_t epoch, uint64_t step) {
  v1::StepPlan plan;
  plan.set_group_epoch(epoch);
  plan.set_step(step);
  return plan;
}

// A plan with one sequence that samples a token at once.
inline v1::StepPlan OneTokenPlan(uint64_t epoch) {
  v1::StepPlan plan = EmptyPlan(epoch, 1);
  v1::SequenceStart& start = *plan.add_starts();
  start.add_tokens(1);
  start.set_num_prompt_tokens(1);
  start.mutable_prefill()->mutable_all();
  start.mutable_decode()->mutable_all();
  v1::StepRow& row = *plan.add_rows();
  row.set_num_tokens(1);
  row.add_new_blocks(0);
  row.set_sample(true);
  return plan;
}

inline absl::StatusOr<v1::StepReply> Step(WorkerGroup& group, const v1::StepPlan& plan) {
  KVASIR_RETURN_IF_ERROR(group.Send(plan));
  return group.AwaitReply();
}

}  // namespace kvasir::coordinator
