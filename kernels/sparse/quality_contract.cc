#include "kernels/sparse/quality_contract.h"

#include <algorithm>
#include <limits>

#include "kernels/base/status_macros.h"
#include "kernels/paged/compact_positions.h"
#include "kernels/sparse/mass_estimate.h"
#include "kernels/sparse/select_common.h"

namespace kvasir::kernels {

int64_t LargestBudget(const SelectionNumbers& numbers, int64_t tokens) {
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
  p.memories = {};  // what is remembered are selections with the policy's own budget
  p.numbers = numbers_;
  p.wanted = wanted_;
  KVASIR_RETURN_IF_ERROR(Estimate(p, selection, executor));
  MakeDense(p, selection);
  while (Widen(p)) {
    KVASIR_RETURN_IF_ERROR(stages.selector.Select(p, selection, executor));
    if (p.rope != nullptr) AssignPositions(selection);
    if (stages.pruner != nullptr) {
      KVASIR_RETURN_IF_ERROR(stages.pruner->Prune(p, selection, executor));
    }
    KVASIR_RETURN_IF_ERROR(Estimate(p, selection, executor));
  }
  return absl::OkStatus();
}

// False: no row has a contract.
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
    wanted_[i] = row.numbers.quality.min_mass > 0 && row.block.num_rows == 1 &&
                 row.header.kind == SelectionHeader::Kind::kList;
    any |= wanted_[i] != 0;
  }
  return any;
}

// Of the wanted rows, and whether they are in violation: kMissed, for now.
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

// An unknown mass, of a row that fails, is no violation.
bool ContractKeeper::IsViolated(int64_t row, const SelectionNumbers& numbers) const {
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
    row.header = MakeAllHeader(row.block);
    outcomes_[i] = ContractOutcome::kDense;
    std::fill_n(masses_.begin() + row.index * group_, group_, 1.0f);
  }
}

// Doubles the budgets of blocks with rows in violation, which are wanted from now on. False: there
// is nothing left to widen.
bool ContractKeeper::Widen(const SelectParams& params) {
  const int64_t num_heads = params.kv.layout.num_kv_heads;
  bool any = false;
  for (size_t b = 0; b < numbers_.size(); ++b) {
    const auto rows = static_cast<int64_t>(b) * num_heads;
    SelectionNumbers& numbers = numbers_[b];
    const int64_t largest = LargestBudget(numbers, params.blocks[b].first_position + 1);
    const bool grows = numbers.budget_tokens < largest;
    bool violated = false;
    for (int64_t row = rows; row < rows + num_heads; ++row) {
      const auto i = static_cast<size_t>(row);
      wanted_[i] = grows && outcomes_[i] == ContractOutcome::kMissed;
      violated |= wanted_[i] != 0;
    }
    if (violated) numbers.budget_tokens = std::min(2 * numbers.budget_tokens, largest);
    any |= violated;
  }
  return any;
}

}  // namespace kvasir::kernels
