#include "worker/engine/prefix_reads.h"

#include <algorithm>

#include "kernels/paged/paged_kv.h"

namespace kvasir::worker {
namespace {

// Tokens of a prefix that so many queries (tiles, or tokens of a tail) read in a layer.
int64_t ReadInLayer(const PhaseReads& reads, int64_t layer, int64_t queries, int64_t prefix) {
  if (queries == 0) return 0;
  if (reads.declared.has_all() || layer < reads.phase.dense_layers) return queries * prefix;
  const kernels::PolicyNumbers& numbers = reads.phase.numbers;
  const int64_t near = numbers.sink_tokens + numbers.window_tokens;
  const int64_t budget = BudgetInLayer(reads.phase.layer_budgets, layer, numbers.budget_tokens);
  // The window leaves the prefix as queries go on, and nothing else of it is chosen.
  if (budget == 0) return std::min(prefix, near);
  return queries * std::min(prefix, near + budget);
}

}  // namespace

bool ReadWholePrefix(const Sequence& sequence, const PhaseReads& prefill, const PhaseReads& decode,
                     int64_t num_layers, std::span<const int64_t> layer_windows) {
  const int64_t prefix = sequence.kv_length;
  const int64_t tail_begin = std::max(prefix, sequence.decode_begin);
  const int64_t tiles = (tail_begin - prefix + kernels::kPageTokens - 1) / kernels::kPageTokens;
  const int64_t tail = std::max<int64_t>(0, sequence.given_size - tail_begin);
  int64_t read = 0;
  for (int64_t layer = 0; layer < num_layers; ++layer) {
    const int64_t window = layer_windows.empty() ? 0 : layer_windows[static_cast<size_t>(layer)];
    read += window != 0 ? std::min(prefix, window)
                        : ReadInLayer(prefill, layer, tiles, prefix) +
                              ReadInLayer(decode, layer, tail, prefix);
  }
  return read >= num_layers * prefix;
}

}  // namespace kvasir::worker
