// The quality contract: repairs selections of decoding that keep less attention mass than their
// policy asks for, before attention reads them. A row (query tile of one query, KV head) is in
// violation if for some query head of its group
//
//   (1 - mass) * kUnreadMassFactor > 1 - min_mass         mass as estimated (mass_estimate.h)
//
// The factor covers the error of the estimate (docs/quality.md). Then, by on_violation:
//
//   dense   the row attends to everything
//   widen   the row selects (and prunes) with twice the budget, until it is not in violation or has
//           the largest budget; such a selection is not remembered for later steps
//   report  nothing
//
// Rows of kind kAll, rows of several queries and rows without min_mass are under no contract. The
// outcome depends on the row alone. Thread-compatible.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/sparse/common/stages.h"

namespace kvasir::kernels {

inline constexpr float kUnreadMassFactor = 1.1f;

enum class ContractOutcome : uint8_t {
  kNone,     // no contract
  kKept,     // the selection keeps enough unchanged
  kDense,    // the row was made dense
  kWidened,  // the selection keeps enough after widening
  kMissed,   // the selection keeps too little
};

// The largest budget that a row with these numbers may get over a context of `tokens`.
int64_t LargestBudget(const PolicyNumbers& numbers, int64_t tokens);

class ContractKeeper {
 public:
  // The stages that made the selection.
  struct Stages {
    const Selector& selector;
    const Pruner* pruner = nullptr;  // null: none
  };

  // Judges and repairs `selection` after pruning. REQUIRES: the selection has room for
  // Selector::MaxEntries of LargestBudget. Errors: those of EstimateMass and of the stages.
  absl::Status Keep(const Stages& stages, const SelectParams& params, PageSelection& selection,
                    Executor& executor);

  // Results of the last Keep: [rows], and [rows, heads of a group] of the final selection's masses,
  // NaN where there is no contract.
  std::span<const ContractOutcome> outcomes() const { return outcomes_; }
  std::span<const float> masses() const { return masses_; }

 private:
  bool Begin(const SelectParams& params, const PageSelection& selection);
  absl::Status Estimate(const SelectParams& params, const PageSelection& selection,
                        Executor& executor);
  bool IsViolated(int64_t row, const PolicyNumbers& numbers) const;
  void MakeDense(const SelectParams& params, const PageSelection& selection);
  absl::StatusOr<bool> Widen(const SelectParams& params, Scope scope);

  int64_t group_ = 0;
  std::vector<ContractOutcome> outcomes_;
  std::vector<float> masses_;
  std::vector<uint8_t> wanted_;         // rows that the coming Select and Estimate work on
  std::vector<float> violated_;         // per query tile: 1 if it has a row to widen
  std::vector<PolicyNumbers> numbers_;  // with widened budgets
};

}  // namespace kvasir::kernels
