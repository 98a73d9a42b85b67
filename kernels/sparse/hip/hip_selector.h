// The selector `hip` (HiP attention, arXiv 2406.09827): searches the best blocks of 2 tokens in
// time logarithmic in the context, by halving n intervals that begin as even parts of all
// candidates:
//
//   blocks of 2 tokens from sink_end on; N of them before candidates_end, n = budget_tokens / 2
//   nodes  : node j = blocks [round(j N / n), round((j + 1) N / n))
//   repeat until no node is longer than one block:
//     each node -> left half (floor) and right half; an empty left half is dropped
//     score of a half = max over sampled queries and heads of the group, and over the tokens of
//                       the half's centre block (start + floor(length / 2)), of q . k
//     the n halves of the largest scores are the next nodes, the later one first among equals
//
// A centre block stands for its whole half, so tokens far from a centre may be missed. The sampled
// queries of a query tile are 1, 3, 5, ... and the last. Scores are exact float32, unscaled; NaN is
// the smallest. Where the candidates fit the budget, all are chosen. Entries hold tokens; `score`
// is the best score of the entry's blocks when they were last scored. Differs from the paper: heads
// of one KV group share a list (the paper's are per head); where keys are cached un-rotated, query
// r of a tile is at distance window_tokens + r from all keys; the block size is 2 and the
// representative the centre, which are the paper's defaults. Cost: reads at most 4 n keys per
// halving, log2(N / n) halvings. Thread-compatible.
#pragma once

#include "kernels/sparse/common/stages.h"

namespace kvasir::kernels {

class HipSelector : public Selector {
 public:
  absl::Status Select(const SelectParams& params, PageSelection& out,
                      Executor& executor) const override;
  int64_t MaxEntries(const PolicyNumbers& numbers, int64_t tokens) const override;
  bool ReadsQueries() const override { return true; }
  SkipReason skip_reason() const override { return SkipReason::kSelectedOut; }
  GpuSupport SupportsGpu() const override {
    return {.runs = true, .reuses = true, .reads_keys = true};
  }
};

}  // namespace kvasir::kernels
