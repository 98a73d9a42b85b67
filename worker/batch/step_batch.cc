#include "worker/batch/step_batch.h"

#include <algorithm>
#include <utility>

#include "kernels/sparse/quality/quality_contract.h"
#include "kernels/sparse/reuse/reusing_select.h"

namespace kvasir::worker {
namespace {

using kernels::kPageTokens;
using kernels::QueryTile;

// One query tile before tiles are sorted by selector.
struct Piece {
  QueryTile tile;
  TileInfo info;
  const PhasePolicy* policy = nullptr;
};

// Appends the query tiles of one row, whose tokens start at `first_row` of the batch.
void CutRow(const RowWork& work, int64_t row, int64_t first_row, std::vector<Piece>& pieces) {
  const Sequence& sequence = *work.sequence;
  const int64_t end = work.begin + work.num_tokens;
  for (int64_t position = work.begin; position < end;) {
    const bool decode = position >= sequence.decode_begin;
    int64_t piece_end = position + 1;
    if (!decode) {
      const int64_t page_end = (position / kPageTokens + 1) * kPageTokens;
      piece_end = std::min({page_end, end, sequence.decode_begin});
    }
    const PhasePolicy& policy = decode ? sequence.decode : sequence.prefill;
    pieces.push_back(
        {.tile = {.slot = work.slot,
                  .first_row = first_row + position - work.begin,
                  .num_rows = piece_end - position,
                  .first_position = position},
         .info = {.row = row,
                  .phase = decode ? Phase::kDecode : Phase::kPrefill,
                  .dense_layers = policy.dense_layers,
                  .layer_budgets = policy.layer_budgets,
                  .sequence = sequence.id,
                  .memory = position >= sequence.prompt_size ? sequence.memory.get() : nullptr},
         .policy = &policy});
    position = piece_end;
  }
}

void AddAppends(const RowWork& work, int64_t first_row, std::vector<QueryTile>& appends) {
  const int64_t end = work.begin + work.num_tokens;
  for (int64_t position = work.begin; position < end;) {
    const int64_t piece_end = std::min((position / kPageTokens + 1) * kPageTokens, end);
    appends.push_back({.slot = work.slot,
                       .first_row = first_row + position - work.begin,
                       .num_rows = piece_end - position,
                       .first_position = position});
    position = piece_end;
  }
}

}  // namespace

StepBatch MakeStepBatch(std::span<const RowWork> rows, std::span<const ServedSelector> selectors,
                        std::vector<Truncation> truncations, const LayerWindows& windows) {
  StepBatch batch;
  batch.truncations = std::move(truncations);
  std::vector<Piece> pieces;
  for (size_t r = 0; r < rows.size(); ++r) {
    const RowWork& work = rows[r];
    const int64_t first_row = batch.num_tokens();
    batch.row_begins.push_back(first_row);
    batch.row_policies.push_back(work.sequence->policy);
    batch.row_observed.push_back(work.observe ? 1 : 0);
    for (int64_t i = 0; i < work.num_tokens; ++i) {
      const int64_t position = work.begin + i;
      batch.tokens.push_back(work.sequence->tokens[static_cast<size_t>(position)]);
      batch.fed_by.push_back(static_cast<int32_t>(work.fed_by));
      batch.positions.push_back(position);
    }
    CutRow(work, static_cast<int64_t>(r), first_row, pieces);
    AddAppends(work, first_row, batch.appends);
    for (int64_t position = work.score_begin; position < work.score_end; ++position) {
      batch.scored_tokens.push_back(first_row + position - work.begin);
    }
    if (work.sample) {
      batch.sampled_tokens.push_back(batch.num_tokens() - 1);
      batch.sampled_rows.push_back(static_cast<int64_t>(r));
    }
  }
  batch.row_begins.push_back(batch.num_tokens());
  std::stable_sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) {
    return a.policy->selector < b.policy->selector;
  });
  for (const Piece& piece : pieces) {
    const int64_t index = static_cast<int64_t>(batch.tiles.size());
    const ServedSelector* served = &selectors[static_cast<size_t>(piece.policy->selector)];
    if (batch.groups.empty() || batch.groups.back().served != served) {
      batch.groups.push_back({.served = served, .begin = index, .end = index});
    }
    ++batch.groups.back().end;
    batch.tiles.push_back(piece.tile);
    batch.numbers.push_back(piece.policy->numbers);
    if (piece.info.memory != nullptr) {
      kernels::PolicyNumbers& numbers = batch.numbers.back();
      numbers.reach_tokens = kernels::ReachTokens(*served->selector, *served->reuse, numbers.reuse);
    }
    batch.infos.push_back(piece.info);
  }
  batch.windows = windows;
  if (windows.served != nullptr) {
    batch.window_groups = {{.served = windows.served, .end = std::ssize(batch.tiles)}};
  }
  return batch;
}

int64_t WindowOfLayer(const StepBatch& batch, int64_t layer) {
  const auto windows = batch.windows.tokens;
  return windows.empty() ? 0 : windows[static_cast<size_t>(layer)];
}

std::span<const SelectorGroup> GroupsInLayer(const StepBatch& batch, int64_t layer) {
  return WindowOfLayer(batch, layer) == 0 ? batch.groups : batch.window_groups;
}

kernels::PolicyNumbers NumbersInLayer(const StepBatch& batch, int64_t b, int64_t layer) {
  if (const int64_t window = WindowOfLayer(batch, layer); window != 0) {
    return {.sink_tokens = 0, .window_tokens = window, .budget_tokens = 0};
  }
  const QueryTile& tile = batch.tiles[static_cast<size_t>(b)];
  kernels::PolicyNumbers numbers = batch.numbers[static_cast<size_t>(b)];
  const TileInfo& info = batch.infos[static_cast<size_t>(b)];
  numbers.budget_tokens = BudgetInLayer(info.layer_budgets, layer, numbers.budget_tokens);
  // The window is never less than the policy's: selectors have a minimum, and it must hold
  // everything that a selection reaches into.
  if (layer < info.dense_layers) {
    numbers.window_tokens = std::max(numbers.window_tokens, tile.first_position + tile.num_rows);
  }
  return numbers;
}

int64_t SelectionCapacity(const StepBatch& batch, int64_t layer) {
  int64_t capacity = 0;
  for (const SelectorGroup& group : GroupsInLayer(batch, layer)) {
    for (int64_t b = group.begin; b < group.end; ++b) {
      const QueryTile& tile = batch.tiles[static_cast<size_t>(b)];
      const int64_t tokens = tile.first_position + tile.num_rows;
      kernels::PolicyNumbers numbers = NumbersInLayer(batch, b, layer);
      numbers.budget_tokens = kernels::LargestBudget(numbers, tokens);
      capacity = std::max(capacity, group.served->selector->MaxEntries(numbers, tokens));
    }
  }
  return capacity;
}

}  // namespace kvasir::worker
