// The selector `tokenselect` (arXiv 2411.02886, section 3) chooses the tokens with most votes.
// Every query head of the KV group votes with its own softmax over the candidates:
//
//   qbar[h]  = mean over the tile's queries of q[h]                  (decode: the query itself)
//   s[h][j]  = scale * qbar[h] . k[j]    for j in [sink_end, candidates_end), exact
//   vote[j]  = sum over the group's heads of softmax_j(s[h])         (soft vote)
//   chosen   = the budget_tokens tokens of the largest votes, later tokens first among equals
//
// The softmax makes heads comparable: without it one head with large logits decides for all. Logits
// are scaled as attention scales them, so votes in decoding are the attention mass that a token
// would get among the candidates. Weights below e^-87 are 0. A NaN logit counts as -inf; a head
// whose logits are all -inf gives no votes. Entries hold tokens; `score` is the largest vote of the
// entry's tokens.
//
//   option scope   "group" (default): heads of one KV group share a list; "layer", the paper's: all
//                  heads of the layer vote together, in fixed point (2^-52), so that a selection is
//                  the same whatever ranks hold the heads
//
// Differs from the paper: heads map to KV heads by h / G (the paper's h mod Hkv does not fit
// grouped models). A prompt's queries are averaged over tiles of at most 64, not 512. Where keys
// are cached rotated, they and the queries keep their rotation; else query r of a tile is at
// distance window_tokens + r from every key, as in the paper's code. The paper's logits are not
// scaled, which makes votes peaked and keeps less mass (docs/quality.md). Cost: reads every
// candidate's key once, and 4 * (G + 1) bytes of scratch per candidate and thread. Linear in the
// context. Thread-compatible.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"

#include "kernels/base/host_device.h"
#include "kernels/sparse/common/method_options.h"
#include "kernels/sparse/common/stages.h"

namespace kvasir::kernels {

// Least exponent of a vote: exp of less is denormal.
inline constexpr float kLeastVoteExponent = -87;

// Votes of a layer are integers in units of 2^-52. Sums of up to 1024 heads are exact, in any order
// and on any ranks.
inline constexpr double kVoteUnits = 0x1p52;
KVASIR_HOST_DEVICE constexpr float VoteOfUnits(int64_t units) {
  return static_cast<float>(static_cast<double>(units) / kVoteUnits);
}

class TokenSelectSelector : public Selector {
 public:
  // INVALID_ARGUMENT for an unknown option or scope.
  static absl::StatusOr<Scope> Parse(const MethodOptions& options);
  static absl::StatusOr<std::unique_ptr<Selector>> Create(const MethodOptions& options);

  absl::Status Select(const SelectParams& params, PageSelection& out,
                      Executor& executor) const override;
  int64_t MaxEntries(const PolicyNumbers& numbers, int64_t tokens) const override;
  bool ReadsQueries() const override { return true; }
  Scope scope() const override { return scope_; }
  SkipReason skip_reason() const override { return SkipReason::kSelectedOut; }
  GpuSupport SupportsGpu() const override {
    return {.runs = true, .reuses = true, .reads_keys = true, .any_group = false};
  }

 private:
  explicit TokenSelectSelector(Scope scope) : scope_(scope) {}

  const Scope scope_;
};

}  // namespace kvasir::kernels
