// Attention of a layer on the CPU, from its queries to their outputs: the stages of each row's
// policy in order, then attention over pages. One path for dense and sparse, for prefill and
// decode. It holds the memory of a layer's selection; layers take turns. Called by the CPU backend.
// Thread-compatible.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/attention/attend.h"
#include "kernels/base/executor.h"
#include "kernels/base/scratch.h"
#include "kernels/paged/grouped_positions.h"
#include "kernels/paged/page_selection.h"
#include "kernels/rope/rope.h"
#include "kernels/sparse/common/stages.h"
#include "kernels/sparse/quality/quality_contract.h"
#include "worker/backend/backend.h"

namespace kvasir::worker {

// Positions of a step's tokens, as attention needs them.
struct CpuRotation {
  kernels::QueryRotation queries = {};          // by which queries were rotated
  kernels::RopePositions* positions = nullptr;  // of un-rotated keys; null: keys are rotated
  kernels::GroupedPositions grouped = {};       // off: un-rotated keys are at compact positions
};

class CpuAttention {
 public:
  absl::Status Select(const StepInputs& step, const CpuRotation& rotation,
                      const LayerQueries& queries, kernels::Executor& executor);
  // Attends to what Select selected.
  absl::Status Attend(const StepInputs& step, const CpuRotation& rotation,
                      const LayerQueries& queries, const kernels::TensorView& out,
                      kernels::Executor& executor);

 private:
  void SetNumbers(const StepBatch& batch, int64_t layer);
  // Makes selection_, with a row for each (query tile, KV head) and room for what the selectors may
  // need in the layer.
  absl::Status MakeSelection(const StepInputs& step, int64_t layer);
  absl::Status SelectGroup(const SelectorGroup& group, const kernels::SelectParams& params,
                           kernels::PageSelection& rows, const StepInputs& step,
                           kernels::Executor& executor);
  // Returns the memories of earlier steps for the rows of a group.
  std::span<kernels::RowMemory* const> MemoriesOf(const StepInputs& step,
                                                  const SelectorGroup& group, int64_t layer);
  // Corrects selections that fall short of a policy's min_mass.
  absl::Status KeepContract(const StepInputs& step, const SelectorGroup& group,
                            const kernels::SelectParams& params, kernels::PageSelection& rows,
                            kernels::Executor& executor);
  void MakeTerminations(const StepInputs& step, int64_t layer);
  // Asks for the selected pages that lie on disk.
  void WantPages(const StepInputs& step, int64_t layer);

  // Lists grow with the budgets that requests ask for.
  std::vector<kernels::SelectionHeader> headers_;
  kernels::Scratch entries_;
  kernels::PageSelection selection_;
  kernels::ContractKeeper contract_keeper_;
  kernels::Scratch scratch_;
  kernels::Scratch lse_;
  // The current layer's numbers, with its budgets and dense layers applied.
  std::vector<kernels::PolicyNumbers> numbers_;
  std::vector<kernels::RowMemory*> memories_;  // of the rows of a group
  std::vector<uint8_t> faults_;                // [num_slots]
  // Empty where no policy ends rows early.
  std::vector<kernels::Termination> terminations_;
  std::vector<kernels::UnreadPages> unread_;
  // Pages of the layer on disk, in the order of rows, each once.
  std::vector<int64_t> wanted_;
  absl::flat_hash_set<int64_t> seen_;
};

}  // namespace kvasir::worker
