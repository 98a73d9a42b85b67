// One step as the model computes it: the tokens of all rows side by side, cut into query blocks.
// The cut depends on absolute positions only, never on chunks or neighbours, so a token's result
// does not either:
//
//   positions   0       64      128     192  decode_begin   prompt end
//               |-------|-------|-------|-------|.|.|.|.|.|.|.|.|.|
//               prefill part, blocks within     decode part, one token a block
//               [64 i, 64 i + 64)
//
// Made by the engine from the rows of a plan; read by the transformer. Plain data and a function
// without state.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/attention/terminator.h"
#include "kernels/dense/sampling.h"
#include "kernels/paged/paged_kv.h"
#include "kernels/sparse/stages.h"
#include "worker/sequence.h"

namespace kvasir::worker {

enum class Phase : uint8_t { kPrefill = 0, kDecode = 1 };

// A selector of the engine's, when its choice serves again, and what follows it; sequences name it
// by index.
struct ServedSelector {
  std::unique_ptr<kernels::Selector> selector;
  std::unique_ptr<kernels::ReuseRule> reuse = nullptr;        // null: every step selects
  std::unique_ptr<kernels::Pruner> pruner = nullptr;          // null: nothing is pruned
  std::unique_ptr<kernels::Terminator> terminator = nullptr;  // null: nothing ends early
  bool dense = false;                                         // all is attended to
};

// Query blocks [begin, end) that one selector serves.
struct SelectorGroup {
  const ServedSelector* served = nullptr;
  int64_t begin = 0;
  int64_t end = 0;
};

// What there is to know of a query block besides its tokens.
struct BlockInfo {
  int64_t row = 0;  // index of the RowWork it belongs to
  Phase phase = Phase::kPrefill;
  int64_t dense_layers = 0;
  std::span<const LayerBudget> layer_budgets = {};
  kernels::SequenceId sequence;
  kernels::RememberedSelections* memory = nullptr;  // null: its selection is made anew
};

struct StepBatch {
  std::vector<int32_t> tokens;
  std::vector<int32_t> fed_by;  // of each token: RowWork::fed_by
  std::vector<int64_t> positions;
  // First token of each row, and the end: row r has tokens [row_begins[r], row_begins[r + 1]).
  std::vector<int64_t> row_begins;
  std::vector<Truncation> truncations;  // before anything is appended
  // What is written to the KV: per slot in ascending position, each within one token block.
  std::vector<kernels::QueryBlock> appends;
  // What attends, ordered by selector.
  std::vector<kernels::QueryBlock> blocks;
  std::vector<kernels::SelectionNumbers> numbers;  // of each block
  std::vector<BlockInfo> infos;                    // of each block
  std::vector<SelectorGroup> groups;
  // Tokens whose logits are wanted, ascending, and the rows they belong to.
  std::vector<int64_t> sampled_tokens;
  std::vector<int64_t> sampled_rows;
  // How a token is chosen from each of these logits; the engine's, and what it refers to, too.
  std::vector<kernels::SamplingOptions> sampling;
  bool keeps_logits = false;  // they are wanted in host memory

  int64_t num_tokens() const { return static_cast<int64_t>(tokens.size()); }
  bool is_fed() const {
    return std::any_of(fed_by.begin(), fed_by.end(), [](int32_t index) { return index >= 0; });
  }
};

// REQUIRES: the rows were checked by the slot table; selector indices are within `selectors`; a
// sequence has memory only if its decode selector has a reuse rule.
StepBatch MakeStepBatch(std::span<const RowWork> rows, std::span<const ServedSelector> selectors,
                        std::vector<Truncation> truncations = {});

// The numbers of block `b` in a layer: with the layer's own budget; and in layers that stay dense
// the window is the whole context, which is what dense means (rule R2): no path of its own.
kernels::SelectionNumbers NumbersInLayer(const StepBatch& batch, int64_t b, int64_t layer);

// Entries that any row of the layer's selection needs at most.
int64_t SelectionCapacity(const StepBatch& batch, int64_t layer);

}  // namespace kvasir::worker
