// One step as the model computes it: the tokens of all rows side by side, cut into query tiles. The
// cut depends on absolute positions only, never on chunks or neighbours, so neither does a token's
// result:
//
//   positions   0       64      128     192  decode_begin   prompt end
//               |-------|-------|-------|-------|.|.|.|.|.|.|.|.|.|
//               prefill part, tiles within      decode part, one token a tile
//               [64 i, 64 i + 64)
//
// Made by the engine from the rows of a plan, read by the transformer. Plain data and a function
// without state.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/attention/terminator.h"
#include "kernels/paged/paged_kv.h"
#include "kernels/sampling/sampling.h"
#include "kernels/sparse/common/cuda_selector.h"
#include "kernels/sparse/common/stages.h"
#include "worker/batch/sequence.h"

namespace kvasir::worker {

enum class Phase : uint8_t { kPrefill = 0, kDecode = 1 };

// One of the engine's selectors, the rule by which its selection is reused, and the stages that
// follow it. Sequences name it by index.
struct ServedSelector {
  std::unique_ptr<kernels::Selector> selector;
  std::unique_ptr<kernels::ReuseRule> reuse = nullptr;        // null: every step selects
  std::unique_ptr<kernels::Pruner> pruner = nullptr;          // null: nothing is pruned
  std::unique_ptr<kernels::Terminator> terminator = nullptr;  // null: nothing ends early
  bool dense = false;                                         // attends to everything
  kernels::CudaStages on_gpu = {};  // the same stages as a GPU runs them; null on the CPU
};

// Query tiles [begin, end) that one selector serves.
struct SelectorGroup {
  const ServedSelector* served = nullptr;
  int64_t begin = 0;
  int64_t end = 0;
};

// Facts about a query tile besides its tokens.
struct TileInfo {
  int64_t row = 0;  // index of the RowWork it belongs to
  Phase phase = Phase::kPrefill;
  int64_t dense_layers = 0;
  std::span<const LayerBudget> layer_budgets = {};
  kernels::SequenceId sequence;
  kernels::RememberedSelections* memory = nullptr;  // null: it always selects
};

// Layers in which the model itself sees a window of tokens only. Whatever a sequence's policy is,
// these layers attend to that window: `streaming` without a sink selects it. Borrowed.
struct LayerWindows {
  std::span<const int64_t> tokens = {};    // ModelConfig::layer_windows
  const ServedSelector* served = nullptr;  // `streaming`; null where no layer has a window
};

struct StepBatch {
  std::vector<int32_t> tokens;
  std::vector<int32_t> fed_by;  // per token: RowWork::fed_by
  std::vector<int64_t> positions;
  // First token of each row, and the end: row r has tokens [row_begins[r], row_begins[r + 1]).
  std::vector<int64_t> row_begins;
  std::vector<size_t> row_policies;     // of each row, Sequence::policy
  std::vector<uint8_t> row_observed;    // of each row, RowWork::observe
  std::vector<Truncation> truncations;  // applied before anything is appended
  // Tokens written to the KV: per slot in ascending position, each within one token block.
  std::vector<kernels::QueryTile> appends;
  // Query tiles that attend, ordered by selector.
  std::vector<kernels::QueryTile> tiles;
  std::vector<kernels::PolicyNumbers> numbers;  // per query tile
  std::vector<TileInfo> infos;                  // per query tile
  std::vector<SelectorGroup> groups;            // of layers without a window
  LayerWindows windows;
  std::vector<SelectorGroup> window_groups;  // of layers with a window: all tiles
  // Tokens whose logits are used, ascending, and the rows they belong to.
  std::vector<int64_t> sampled_tokens;
  std::vector<int64_t> sampled_rows;
  // How a token is chosen from each of these logits. The engine owns this and what it refers to.
  std::vector<kernels::SamplingOptions> sampling;
  // Tokens of prompts whose logits are compared with the token that follows, ascending, and how:
  // each of the options has a given token. The engine owns what they refer to.
  std::vector<int64_t> scored_tokens;
  std::vector<kernels::SamplingOptions> scoring;
  bool keeps_logits = false;  // keep a copy of the sampled rows' logits in host memory

  int64_t num_tokens() const { return static_cast<int64_t>(tokens.size()); }
  bool is_fed() const {
    return std::any_of(fed_by.begin(), fed_by.end(), [](int32_t index) { return index >= 0; });
  }
};

// REQUIRES: the rows were checked by the slot table; selector indices are within `selectors`; a
// sequence has memory only if its decode selector has a reuse rule.
StepBatch MakeStepBatch(std::span<const RowWork> rows, std::span<const ServedSelector> selectors,
                        std::vector<Truncation> truncations = {}, const LayerWindows& windows = {});

// Returns how many tokens a query sees in a layer, its own included, by the model's definition; 0:
// all before it.
int64_t WindowOfLayer(const StepBatch& batch, int64_t layer);

// Returns the groups that serve a layer.
std::span<const SelectorGroup> GroupsInLayer(const StepBatch& batch, int64_t layer);

// Returns the numbers of query tile `b` in a layer, with the layer's own budget. In layers that
// stay dense the window is the whole context: dense attention is no separate path (rule R2). In
// layers with a window of the model there is nothing else.
kernels::PolicyNumbers NumbersInLayer(const StepBatch& batch, int64_t b, int64_t layer);

// Returns the most entries that any row of the layer's selection needs.
int64_t SelectionCapacity(const StepBatch& batch, int64_t layer);

}  // namespace kvasir::worker
