#include "kernels/sparse/quality/quality_contract.h"

#include <algorithm>
#include <limits>

#include "kernels/base/status_macros.h"
#include "kernels/paged/compact_positions.h"
#include "kernels/sparse/common/select_common.h"
#include "kernels/sparse/quality/mass_estimate.h"

namespace kvasir::kernels {

int64_t LargestBudget(const PolicyNumbers& numbers, int64_t tokens) {
  const QualityNumbers& quality = numbers.quality;
  if (quality.min_mass <= 0 || quality.on_violation != OnViolation::kWiden) {
    return numbers.budget_tokens;
  }
  const int64_t most = quality.max_budget_tokens == 0 ? tokens : quality.max_budget_tokens;
  return std::max(numbers.budget_tokens, std::min(most, tokens));
}

absl::Status ContractKeeper::Keep(const Stages& stages, const SelectParams& params,
                                  PageSelection& selection, Executor& executor) {
  if (!Begin(params, selection)) return absl::OkStatus();
  SelectParams p = params;
  p.memories = {};  // only selections with the policy's own budget are remembered
  p.numbers = numbers_;
  p.wanted = wanted_;
  KVASIR_RETURN_IF_ERROR(Estimate(p, selection, executor));
  MakeDense(p, selection);
  while (true) {
    KVASIR_ASSIGN_OR_RETURN(const bool widens, Widen(p, stages.selector.scope()));
    if (!widens) return absl::OkStatus();
    KVASIR_RETURN_IF_ERROR(stages.selector.Select(p, selection, executor));
    if (p.rope != nullptr) AssignPositions(selection);
    if (stages.pruner != nullptr) {
      KVASIR_RETURN_IF_ERROR(stages.pruner->Prune(p, selection, executor));
    }
    KVASIR_RETURN_IF_ERROR(Estimate(p, selection, executor));
  }
}

// Returns false if no row has a contract.
bool ContractKeeper::Begin(const SelectParams& params, const PageSelection& selection) {
  const auto rows = static_cast<size_t>(selection.num_rows);
  group_ = params.q.dim(1) / params.kv.layout.num_kv_heads;
  numbers_.assign(params.numbers.begin(), params.numbers.end());
  outcomes_.assign(rows, ContractOutcome::kNone);
  masses_.assign(rows * static_cast<size_t>(group_), std::numeric_limits<float>::quiet_NaN());
  wanted_.assign(rows, 0);
  bool any = false;
  for (size_t i = 0; i < rows; ++i) {
    const SelectRow row(params, selection, static_cast<int64_t>(i));
    wanted_[i] = row.numbers.quality.min_mass > 0 && row.tile.num_rows == 1 &&
                 row.header.kind == SelectionHeader::Kind::kList;
    any |= wanted_[i] != 0;
  }
  return any;
}

// Estimates the wanted rows and judges them. A violation is kMissed until it is repaired.
absl::Status ContractKeeper::Estimate(const SelectParams& params, const PageSelection& selection,
                                      Executor& executor) {
  KVASIR_RETURN_IF_ERROR(EstimateMass(params, selection, masses_, executor));
  for (size_t i = 0; i < outcomes_.size(); ++i) {
    if (wanted_[i] == 0) continue;
    const SelectRow row(params, selection, static_cast<int64_t>(i));
    const ContractOutcome good =
        outcomes_[i] == ContractOutcome::kNone ? ContractOutcome::kKept : ContractOutcome::kWidened;
    outcomes_[i] = IsViolated(row.index, row.numbers) ? ContractOutcome::kMissed : good;
  }
  return absl::OkStatus();
}

// An unknown (NaN) mass, which a row with a fault has, is no violation.
bool ContractKeeper::IsViolated(int64_t row, const PolicyNumbers& numbers) const {
  const auto begin = masses_.begin() + row * group_;
  return std::any_of(begin, begin + group_, [&](float mass) {
    return (1 - mass) * kUnreadMassFactor > 1 - numbers.quality.min_mass;
  });
}

void ContractKeeper::MakeDense(const SelectParams& params, const PageSelection& selection) {
  for (size_t i = 0; i < outcomes_.size(); ++i) {
    const SelectRow row(params, selection, static_cast<int64_t>(i));
    if (outcomes_[i] != ContractOutcome::kMissed ||
        row.numbers.quality.on_violation != OnViolation::kDense) {
      continue;
    }
    row.header = MakeAllHeader(row.tile);
    outcomes_[i] = ContractOutcome::kDense;
    std::fill_n(masses_.begin() + row.index * group_, group_, 1.0f);
  }
}

// Doubles the budgets of query tiles with rows in violation and makes these rows the wanted ones.
// At layer scope all rows of such a tile are wanted, on all ranks. Returns false if nothing is left
// to widen.
absl::StatusOr<bool> ContractKeeper::Widen(const SelectParams& params, Scope scope) {
  const auto heads = static_cast<size_t>(params.kv.layout.num_kv_heads);
  const bool of_layer = scope == Scope::kLayer;
  violated_.assign(numbers_.size(), 0);
  for (size_t i = 0; i < outcomes_.size(); ++i) {
    const size_t b = i / heads;
    const int64_t largest = LargestBudget(numbers_[b], params.tiles[b].first_position + 1);
    wanted_[i] = numbers_[b].budget_tokens < largest && outcomes_[i] == ContractOutcome::kMissed;
    if (wanted_[i] != 0) violated_[b] = 1;
  }
  if (of_layer && params.ranks != nullptr) {
    KVASIR_RETURN_IF_ERROR(params.ranks->Max(violated_));
  }
  bool any = false;
  for (size_t b = 0; b < numbers_.size(); ++b) {
    if (violated_[b] == 0) continue;
    any = true;
    PolicyNumbers& numbers = numbers_[b];
    const int64_t largest = LargestBudget(numbers, params.tiles[b].first_position + 1);
    numbers.budget_tokens = std::min(2 * numbers.budget_tokens, largest);
    if (of_layer) std::fill_n(wanted_.begin() + static_cast<int64_t>(b * heads), heads, uint8_t{1});
  }
  return any;
}

}  // namespace kvasir::kernels
