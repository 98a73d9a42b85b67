// Selects with memory: runs the reuse gate and the stages that it does not stop, and returns the
// list that they or an earlier step made. The result is that of Selector::Select, except
//
//   made_at         the position at which the list's last stage ran
//   reused_stages   number of stages that did not run
//   window_begin    under a rule whose window grows: that of the step in which the first stage ran
//
// A row remembers if it is given a memory (SelectParams::memories). All stages run, whatever the
// rule says, in the row's first step, after a step under rule R2, and at positions that are
// multiples of 64. A sequence resumes only at those positions, and so selects what it would have
// selected without a break. Nothing depends on the rest of the batch. Thread-compatible.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/base/executor.h"
#include "kernels/paged/page_selection.h"
#include "kernels/sparse/common/selection_memory.h"
#include "kernels/sparse/common/stages.h"

namespace kvasir::kernels {

// The value of PolicyNumbers::reach_tokens that a row with memory must be given.
int64_t ReachTokens(const Selector& selector, const ReuseRule& rule, const ReuseNumbers& numbers);

// Steps between two runs of a stage. The first stage's interval is the policy's; those of later
// stages are in proportion, rounded down, and at least 1.
int64_t StageInterval(const Selector& selector, const ReuseNumbers& numbers, size_t stage);

// The facts about a sequence that size its memory.
struct MemoryNeeds {
  const Selector& selector;
  const ReuseRule& rule;
  const KvLayout& layout;
  int64_t group = 0;      // query heads of a KV head
  PolicyNumbers numbers;  // the largest of any layer
  int64_t tokens = 0;     // in the longest context
};
SelectionMemory::Shape ShapeOf(const MemoryNeeds& needs);
absl::StatusOr<std::unique_ptr<SelectionMemory>> MakeSelectionMemory(const MemoryNeeds& needs);

// Query tiles that share a memory have one query each and are adjacent in ascending position.
// Errors: those of Selector::Select.
absl::Status SelectReusing(const Selector& selector, const ReuseRule& rule,
                           const SelectParams& params, PageSelection& out, Executor& executor);

}  // namespace kvasir::kernels
