// The contract of quality: selections of decoding that keep less of the attention mass than their
// policy asks for are made good before attention reads them. A row (query block of one query, KV
// head) is in violation when for some query head of its group
//
//   (1 - mass) * kUnreadMassFactor > 1 - min_mass         mass as estimated (mass_estimate.h)
//
// where the factor covers the error of the estimate (docs/quality.md). Then, by on_violation:
//
//   dense   the row attends to everything
//   widen   it selects (and prunes) with twice the budget, until it is not in violation or has the
//           largest budget; such a selection is not remembered for later steps
//   report  nothing
//
// Rows of kind all, of several queries and without min_mass are under no contract. What is done
// depends on the row alone. Thread-compatible.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/sparse/stages.h"

namespace kvasir::kernels {

inline constexpr float kUnreadMassFactor = 1.1f;

enum class ContractOutcome : uint8_t {
  kNone,     // no contract
  kKept,     // the selection keeps enough as it is
  kDense,    // it was made dense
  kWidened,  // it keeps enough since it was widened
  kMissed,   // it does not
};

// The budget that a row with these numbers may come to have over a context of `tokens`.
int64_t LargestBudget(const SelectionNumbers& numbers, int64_t tokens);

class ContractKeeper {
 public:
  // What made the selection.
  struct Stages {
    const Selector& selector;
    const Pruner* pruner = nullptr;  // null: none
  };

  // `params` and `selection` as behind pruning. REQUIRES: the selection has room for
  // Selector::MaxEntries of LargestBudget. Errors: of EstimateMass and of the stages.
  absl::Status Keep(const Stages& stages, const SelectParams& params, PageSelection& selection,
                    Executor& executor);

  // Of the last Keep: [rows], and [rows, heads of a group] of what is attended to now, NaN where
  // there is no contract.
  std::span<const ContractOutcome> outcomes() const { return outcomes_; }
  std::span<const float> masses() const { return masses_; }

 private:
  bool Begin(const SelectParams& params, const PageSelection& selection);
  absl::Status Estimate(const SelectParams& params, const PageSelection& selection,
                        Executor& executor);
  bool IsViolated(int64_t row, const SelectionNumbers& numbers) const;
  void MakeDense(const SelectParams& params, const PageSelection& selection);
  absl::StatusOr<bool> Widen(const SelectParams& params, Scope scope);

  int64_t group_ = 0;
  std::vector<ContractOutcome> outcomes_;
  std::vector<float> masses_;
  std::vector<uint8_t> wanted_;            // rows that are being worked on
  std::vector<float> violated_;            // blocks with a row to widen for: 1
  std::vector<SelectionNumbers> numbers_;  // with widened budgets
};

}  // namespace kvasir::kernels
