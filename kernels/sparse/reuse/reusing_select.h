// Selecting with memory: the reuse gate, the stages that it does not stop, and the list they or an
// earlier step left. Its result is that of Selector::Select, but for
//
//   made_at         where the list's last stage ran
//   reused_stages   the stages that did not run
//   window_begin    under a rule whose window grows: as when the first stage ran
//
// A row remembers where it is given a memory (SelectParams::memories). Everything runs, whatever
// the rule says, in the row's first step, behind a step under rule R2, and at positions that are
// multiples of 64: a sequence resumes at none but those, and so finds what it would have found.
// Nothing depends on what else is in the batch. Thread-compatible.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/base/executor.h"
#include "kernels/paged/page_selection.h"
#include "kernels/sparse/reuse/selection_memory.h"
#include "kernels/sparse/stages.h"

namespace kvasir::kernels {

// What a row with memory must be given as SelectionNumbers::reach_tokens.
int64_t ReachTokens(const Selector& selector, const ReuseRule& rule, const ReuseNumbers& numbers);

// Steps between two runs of a stage: of the first one as the policy says; of later ones in
// proportion, rounded down.
int64_t StageInterval(const Selector& selector, const ReuseNumbers& numbers, size_t stage);

// A sequence that is to remember.
struct MemoryNeeds {
  const Selector& selector;
  const ReuseRule& rule;
  const KvLayout& layout;
  int64_t group = 0;         // query heads of a KV head
  SelectionNumbers numbers;  // the largest of any layer
  int64_t tokens = 0;        // of the longest context
};
SelectionMemory::Shape ShapeOf(const MemoryNeeds& needs);
absl::StatusOr<std::unique_ptr<SelectionMemory>> MakeSelectionMemory(const MemoryNeeds& needs);

// Blocks of one memory are one query each, and stand side by side in ascending position. Errors: as
// Selector::Select.
absl::Status SelectReusing(const Selector& selector, const ReuseRule& rule,
                           const SelectParams& params, PageSelection& out, Executor& executor);

}  // namespace kvasir::kernels
