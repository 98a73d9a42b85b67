// One running sequence as a worker knows it, and the work that a plan's row asks of it. Plain data,
// owned by the slot table (slot_table.h); read by step_batch.cc. Thread-compatible.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"

#include "kernels/append/digests.h"
#include "kernels/base/strong_id.h"
#include "kernels/sparse/common/selection_memory.h"
#include "kernels/sparse/common/stages.h"
#include "proto/kvasir/v1/worker.pb.h"

namespace kvasir::worker {

// Layers [begin, end) whose budget is not that of the others.
struct LayerBudget {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t budget_tokens = 0;
};

// Returns the budget of a layer: that of the last `layers` it is among, or `otherwise`.
inline int64_t BudgetInLayer(std::span<const LayerBudget> layers, int64_t layer,
                             int64_t otherwise) {
  int64_t budget = otherwise;
  for (const LayerBudget& some : layers) {
    if (layer >= some.begin && layer < some.end) budget = some.budget_tokens;
  }
  return budget;
}

// The attention of a sequence in one phase: one of the engine's selectors, and this sequence's
// numbers.
struct PhasePolicy {
  int64_t selector = 0;  // index into the engine's selectors
  kernels::PolicyNumbers numbers;
  int64_t dense_layers = 0;  // the first layers that attend to everything
  std::vector<LayerBudget> layer_budgets = {};
};

struct Sequence {
  kernels::SequenceId id;
  std::vector<int32_t> tokens;  // the prompt, then what was sampled, or kTokenToCome
  int64_t prompt_size = 0;
  int64_t given_size = 0;    // tokens known at the start: more than the prompt if resumed
  int64_t kv_length = 0;     // positions [0, kv_length) have their KV in `blocks`, or are in flight
  int64_t sound_length = 0;  // leading part of kv_length, computed before anything failed
  std::vector<kernels::BlockId> blocks;  // bound to the slot, in order
  v1::RowSampling sampling;
  size_t policy = 0;  // index into the policies that the server declared
  PhasePolicy prefill, decode;
  // Positions from here on are computed one by one with the decode part: the prompt's tail and
  // generated tokens. Positions before it go in query tiles with the prefill part.
  int64_t decode_begin = 0;
  // Memory of selections that the sequence's generated tokens share; null if they share none. The
  // prompt's tail does not use it: there is nothing to remember yet.
  std::unique_ptr<kernels::RememberedSelections> memory;
  // Not OK once a row of the sequence failed: KV from sound_length on must not be trusted. Rows
  // planned before the coordinator heard of the failure are computed like others, so that ranks
  // stay in step although only one of them may have found it.
  absl::Status failed;
  // The sequence failed for lack of room or for its numbers, on every rank. None of its later rows
  // is computed.
  bool is_left_out = false;
};

// The positions [begin, begin + num_tokens) of the sequence in `slot`, to be computed in this step.
struct RowWork {
  int64_t slot = 0;
  int64_t begin = 0;
  int64_t num_tokens = 0;
  bool sample = false;
  // Positions whose logits are compared with the prompt's next token: [score_begin, score_end).
  int64_t score_begin = 0;
  int64_t score_end = 0;
  bool observe = false;  // the selections of its last query tile are told
  const Sequence* sequence = nullptr;
  // Index among the tokens sampled by the step before, still in flight, of the one that becomes
  // this row's single token. -1: the row's tokens are known.
  int64_t fed_by = -1;
};

// Placeholder in Sequence::tokens for a token that is being sampled.
inline constexpr int32_t kTokenToCome = -1;

// A block whose page bounds must be computed again from its first tokens before it is appended to.
using Truncation = kernels::BlockKeys;

}  // namespace kvasir::worker
