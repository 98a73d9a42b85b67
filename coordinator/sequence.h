// The scheduler's record of one request: its tokens, how far their KV is computed, the blocks that
// hold it, and what has been measured. Part of the scheduler; nobody else sees one.
// Thread-compatible.
//
//   tokens   [0 ............ prompt_tokens ........ tokens.size())      known
//            [0 ..................... given_tokens)                      known when it was admitted
//   KV       [0 ....... computed)                                       on the ranks
//            [computed ....... planned_end())                            plans that are unanswered
//   blocks   [cached | ours, sealed | full or open )                    one per 64 positions
//             0        hashes.size()  blocks.size()
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"

#include "coordinator/block_budget.h"
#include "coordinator/clock.h"
#include "coordinator/policy.h"
#include "kernels/base/strong_id.h"
#include "kvstore/index/prefix_index.h"
#include "proto/kvasir/v1/generation.pb.h"
#include "proto/kvasir/v1/worker.pb.h"

namespace kvasir::coordinator {

using kernels::SequenceId;
using kvstore::kBlockTokens;

// What a request asks of the scheduler: validated, resolved.
struct SequenceSpec {
  SequenceId id;  // never used before
  std::vector<int32_t> prompt;
  int64_t max_tokens = 0;
  v1::RowSampling sampling;  // stop_token_ids holds those of EOS as well, unless ignored
  ResolvedPolicy policy;
  std::string tenant;
  TimePoint arrival;
};

struct Sequence {
  Sequence(SequenceSpec s, const kvstore::PrefixHash& prefix_scope);

  int64_t length() const { return static_cast<int64_t>(tokens.size()); }
  int64_t generated() const { return length() - prompt_tokens; }
  bool in_prefill() const { return computed < prompt_tokens; }
  int64_t planned_end() const { return computed + unanswered_tokens; }
  // With the tokens that unanswered plans sample.
  int64_t planned_length() const { return length() + unanswered_samples; }
  // Its prompt, and when it was preempted what it had generated, is not yet planned.
  bool reading() const { return planned_end() < given_tokens; }
  // Its last token, if no stop comes before it, is sampled by a plan.
  bool is_planned_out() const { return generated() + unanswered_samples == spec.max_tokens; }
  // Its next token is the first of a block that is not taken yet.
  bool enters_block() const { return planned_end() == num_blocks() * kBlockTokens; }
  bool admitted() const { return slot >= 0; }
  int64_t num_blocks() const { return static_cast<int64_t>(blocks.size()); }
  int64_t sealed_blocks() const { return static_cast<int64_t>(hashes.size()); }
  int64_t unsealed_blocks() const { return num_blocks() - sealed_blocks(); }
  // Chain value behind the sealed blocks.
  const kvstore::PrefixHash& chain() const { return hashes.empty() ? scope : hashes.back(); }
  // Tokens of the index-th block, which is full.
  absl::Span<const int32_t> block_tokens(int64_t index) const {
    return absl::MakeConstSpan(tokens).subspan(static_cast<size_t>(index * kBlockTokens),
                                               static_cast<size_t>(kBlockTokens));
  }
  // What it had generated must be computed again one token a step: a window of less than a page
  // makes candidates of pages that are not full, which then must not be ahead of the token.
  bool ReadsAnswerOneByOne() const {
    return generated() > 0 && IsSparse(spec.policy.decode) &&
           int64_t{spec.policy.decode.window_tokens()} < kBlockTokens;
  }
  // Blocks for the prompt and the longest answer; the last token needs no KV.
  int64_t blocks_at_most() const {
    return (prompt_tokens + spec.max_tokens - 1 + kBlockTokens - 1) / kBlockTokens;
  }
  int64_t blocks_to_read() const { return (given_tokens + kBlockTokens - 1) / kBlockTokens; }
  // Tokens that cached blocks may stand in for, plus one: of the prompt those that other requests
  // share, and everything of a sequence that was preempted, which finds its own blocks again.
  absl::Span<const int32_t> matchable() const;
  bool IsStopToken(int32_t token) const;
  // Takes one block more. REQUIRES: as BlockReservation::Take.
  kvstore::BlockId TakeBlock();
  // Gives all blocks except the first `num_to_keep` back, and reserves that many again.
  void GiveBackBlocks(int64_t num_to_keep);
  // Adds what the ranks report of one row.
  void Account(const v1::RowAccounting& row, bool first);
  // `unmeasured`: why the ranks measure no attention mass, as in v1::Ready.
  v1::AttentionReport Report(v1::MassUnmeasured unmeasured) const;
  // The reply's summary; `now` is the end.
  v1::Finish Summary(v1::FinishReason reason, v1::MassUnmeasured unmeasured, TimePoint now) const;

  SequenceSpec spec;  // without the prompt: it is the start of tokens
  const int64_t prompt_tokens;
  const int64_t private_begin;  // PrivateBegin
  const kvstore::DecodePart decode_part;
  const kvstore::PrefixHash scope;  // start of the chain
  std::vector<int32_t> tokens;

  int64_t given_tokens;
  int64_t preemptions = 0;
  int64_t slot = -1;
  int64_t computed = 0;
  int64_t unanswered_tokens = 0;   // that plans compute which are not answered yet
  int64_t unanswered_samples = 0;  // and what these sample
  std::vector<kvstore::Block> blocks;
  std::vector<kvstore::PrefixHash> hashes;  // chain values behind the sealed blocks
  BlockReservation reservation;             // of the blocks that it may still take

  // Restoring: blocks from restores_begin on are on their way from disk to the ranks.
  int64_t restores_begin = 0;
  int64_t restores_pending = 0;
  TimePoint restore_deadline;  // for the next of them
  bool restore_tried = false;  // once is enough: what fails is computed
  // Not looked at while another request restores this block.
  std::optional<kvstore::PrefixHash> waits_for;
  // Number of prompts that had been read when it was last found too long to pass another one.
  std::optional<int64_t> long_since;

  int64_t reported_tokens = 0;  // the furthest progress that the client has heard of
  int64_t cached_tokens = 0;    // prompt tokens that were not computed
  v1::CachedTokens cached_by_tier;
  v1::PhaseAccounting prefill, decode;  // by the parts of the policy
  v1::MassSamples estimated_mass;
  v1::ContractReport contract;
  uint64_t attended_tokens = 0;  // of decoding, summed over attending_rows
  uint64_t attending_rows = 0;
  std::optional<uint32_t> matched_stop_token;
  std::optional<TimePoint> admitted_at;
  std::optional<TimePoint> first_token_at;
  TimePoint last_token_at;
};

}  // namespace kvasir::coordinator
