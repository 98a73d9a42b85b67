#include "tests/quality/methods.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <span>

#include "kernels/base/status_macros.h"
#include "kernels/sparse/policy.h"
#include "proto/selector_field.h"
#include "worker/batch/policy_stages.h"
#include "worker/engine/slot_table.h"

namespace kvasir::quality {
namespace {

using kernels::kPageTokens;

// Tokens that the row attends to, ascending; and their pages.
std::vector<int32_t> AttendedTokens(const kernels::PageSelection& selection, int64_t row,
                                    int64_t position, int64_t& pages) {
  std::vector<int32_t> tokens;
  pages = 0;
  for (kernels::SelectedPages walk(selection.header(row), selection.list(row), position);
       walk.valid(); walk.Next(), ++pages) {
    for (uint64_t mask = walk.mask(); mask != 0; mask &= mask - 1) {
      tokens.push_back(static_cast<int32_t>(walk.page() * kPageTokens + std::countr_zero(mask)));
    }
  }
  return tokens;
}

// How many of the heaviest tokens of the middle reach the mass, with all that lies around it.
int64_t MinimalBudget(QueryAttention& query, const Middle& middle, double mass) {
  double kept = query.MassAround(middle);
  int64_t tokens = 0;
  for (const int32_t token : query.MiddleByWeight(middle)) {
    if (kept >= mass) break;
    kept += query.weight(token);
    ++tokens;
  }
  return tokens;
}

nlohmann::json Rounded(const std::vector<double>& values) {
  nlohmann::json rounded = nlohmann::json::array();
  for (const double value : values) rounded.push_back(std::round(value * 1e5) / 1e5);
  return rounded;
}

}  // namespace

absl::StatusOr<Method> Method::Create(const v1::SparsityPolicy& policy) {
  const v1::AttentionPolicy& decode = policy.decode();
  Method method;
  method.name_ = policy.name();
  method.numbers_ = worker::NumbersOf(decode);
  KVASIR_ASSIGN_OR_RETURN(method.selector_, kernels::MakeSelector(v1::SelectorName(decode),
                                                                  worker::SelectorOptions(decode)));
  if (decode.top_p() != 0) {
    KVASIR_ASSIGN_OR_RETURN(method.pruner_, kernels::MakePruner("top_p"));
  }
  return method;
}

absl::Status Method::Select(const kernels::SelectParams& params, kernels::Executor& executor) {
  const std::vector<kernels::PolicyNumbers> numbers(params.tiles.size(), numbers_);
  kernels::SelectParams own = params;
  own.numbers = numbers;
  own.scratch = &scratch_;
  const int64_t context = params.tiles.back().first_position + 1;
  const int64_t num_rows = std::ssize(params.tiles) * params.kv.layout.num_kv_heads;
  kernels::PolicyNumbers largest = numbers_;
  largest.budget_tokens = kernels::LargestBudget(numbers_, context);
  const int64_t capacity = selector_->MaxEntries(largest, context);
  headers_.assign(static_cast<size_t>(num_rows), {});
  entries_.assign(static_cast<size_t>(num_rows * capacity), {});
  selection_ = {.headers = headers_.data(),
                .entries = entries_.data(),
                .num_rows = num_rows,
                .capacity = capacity};
  const auto begin = std::chrono::steady_clock::now();
  KVASIR_RETURN_IF_ERROR(selector_->Select(own, selection_, executor));
  if (pruner_ != nullptr) KVASIR_RETURN_IF_ERROR(pruner_->Prune(own, selection_, executor));
  KVASIR_RETURN_IF_ERROR(
      keeper_.Keep({.selector = *selector_, .pruner = pruner_.get()}, own, selection_, executor));
  seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return absl::OkStatus();
}

absl::Status Method::Compare(const kernels::SelectParams& params, const LayerAttention& truth,
                             kernels::Executor& executor) {
  KVASIR_RETURN_IF_ERROR(Select(params, executor));
  // Made here: the map is not to change while threads write to its rows.
  std::vector<Row*> rows;
  for (int64_t head = 0; head < truth.num_heads; ++head) {
    rows.push_back(&rows_[{truth.layer, head}]);
    rows.back()->kv_head = truth.kv_head(head);
  }
  executor.ParallelFor(truth.num_heads, [&](int64_t head, int) {
    Row& row = *rows[static_cast<size_t>(head)];
    for (int64_t step = 0; step < truth.num_steps; ++step) {
      QueryAttention& query = truth.at(step, head);
      int64_t pages = 0;
      const std::vector<int32_t> tokens = AttendedTokens(
          selection_, step * truth.num_kv_heads + row.kv_head, query.num_tokens() - 1, pages);
      if (numbers_.quality.min_mass > 0) {
        const int64_t kept = step * truth.num_kv_heads + row.kv_head;
        const float estimate = keeper_.masses()[static_cast<size_t>(step * truth.num_heads + head)];
        row.outcome.push_back(static_cast<int64_t>(keeper_.outcomes()[static_cast<size_t>(kept)]));
        row.estimate.push_back(std::isnan(estimate) ? 1 : static_cast<double>(estimate));
      }
      row.pages.push_back(pages);
      row.pages_total.push_back((query.num_tokens() + kPageTokens - 1) / kPageTokens);
      Measure(query, tokens, row);
    }
  });
  return absl::OkStatus();
}

void Method::Measure(QueryAttention& query, std::span<const int32_t> tokens, Row& row) const {
  const Middle middle = Middle::Of(numbers_, query.num_tokens() - 1);
  std::vector<uint8_t> is_selected(static_cast<size_t>(query.num_tokens()));
  double mass = 0;
  int64_t selected = 0;
  for (const int32_t token : tokens) {
    mass += query.weight(token);
    is_selected[static_cast<size_t>(token)] = 1;
    selected += middle.contains(token);
  }
  const std::vector<int32_t>& by_weight = query.MiddleByWeight(middle);
  double oracle = query.MassAround(middle);
  int64_t found = 0;
  for (int64_t i = 0; i < selected; ++i) {
    const int32_t token = by_weight[static_cast<size_t>(i)];
    oracle += query.weight(token);
    found += is_selected[static_cast<size_t>(token)];
  }
  row.mass.push_back(mass);
  row.oracle.push_back(oracle);
  row.recall.push_back(selected == 0 ? 1
                                     : static_cast<double>(found) / static_cast<double>(selected));
  row.error.push_back(query.OutputError(tokens));
  row.tokens.push_back(std::ssize(tokens));
  row.context.push_back(query.num_tokens());
  row.selected.push_back(selected);
  if (pruner_ != nullptr) {
    row.minimal.push_back(MinimalBudget(query, middle, static_cast<double>(numbers_.top_p)));
  }
}

nlohmann::json Method::ToJson() const {
  nlohmann::json rows = nlohmann::json::array();
  for (const auto& [key, row] : rows_) {
    rows.push_back({{"layer", key.first},
                    {"head", key.second},
                    {"kv_head", row.kv_head},
                    {"mass", Rounded(row.mass)},
                    {"oracle", Rounded(row.oracle)},
                    {"recall", Rounded(row.recall)},
                    {"error", Rounded(row.error)},
                    {"tokens", row.tokens},
                    {"context", row.context},
                    {"pages", row.pages},
                    {"pages_total", row.pages_total},
                    {"selected", row.selected},
                    {"minimal", row.minimal},
                    {"estimate", Rounded(row.estimate)},
                    {"outcome", row.outcome}});
  }
  return {{"policy", name_}, {"seconds", seconds_}, {"rows", rows}};
}

}  // namespace kvasir::quality
