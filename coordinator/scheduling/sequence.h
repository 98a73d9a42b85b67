// The scheduler's record of one request: its state, its tokens, how far their KV is computed, the
// blocks that hold the KV, and what has been measured. Part of the scheduler; nobody else sees it.
// Thread-compatible.
//
//   tokens   [0 ............ prompt_tokens ........ tokens.size())      known
//            [0 ..................... given_tokens)                      known when it was admitted
//   KV       [0 ....... computed)                                       on the ranks
//            [computed ....... planned_end())                            in unanswered plans
//   blocks   [cached | ours, sealed | full or open )                    one per 64 positions
//             0        hashes.size()  blocks.size()
//            later_blocks: restored ones after a block that was not, which is computed first
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"

#include "coordinator/policy/policy.h"
#include "coordinator/scheduling/block_budget.h"
#include "coordinator/scheduling/scheduler_events.h"
#include "coordinator/time/clock.h"
#include "kernels/base/strong_id.h"
#include "kvstore/index/prefix_index.h"
#include "proto/kvasir/v1/generation.pb.h"
#include "proto/kvasir/v1/worker.pb.h"

namespace kvasir::coordinator {

using kernels::SequenceId;
using kvstore::kBlockTokens;

// A validated and resolved request, as the scheduler takes it.
struct SequenceSpec {
  SequenceId id;  // never used before
  std::vector<int32_t> prompt;
  std::vector<int32_t> answer = {};  // its first tokens, which an earlier request computed
  int64_t max_tokens = 0;
  v1::RowSampling sampling;  // stop_token_ids holds those of EOS as well, unless ignored
  bool wants_prompt_logprobs = false;
  // Another server reads the prompt, until Scheduler::EndReadElsewhere.
  bool is_read_elsewhere = false;
  ResolvedPolicy policy;
  std::string tenant;
  TimePoint arrival;
};

struct Sequence {
  // sequence_table.h has the transitions, and what a sequence holds in each state.
  enum class State { kElsewhere, kWaiting, kRestoring, kRunning, kEnded };
  // A block that the ranks restored, or restore, while one before it has to be computed.
  struct LaterBlock {
    int64_t index = 0;
    kvstore::Block block;
    kvstore::PrefixHash hash;
  };

  Sequence(SequenceSpec s, const kvstore::PrefixHash& prefix_scope);

  int64_t length() const { return static_cast<int64_t>(tokens.size()); }
  int64_t generated() const { return length() - prompt_tokens; }
  bool in_prefill() const { return computed < prompt_tokens; }
  int64_t planned_end() const { return computed + unanswered_tokens; }
  // Length with the tokens that unanswered plans sample.
  int64_t planned_length() const { return length() + unanswered_samples; }
  // Number of tokens not yet planned of the prompt and, after a preemption, of the tokens generated
  // before it. Negative once the sequence decodes.
  int64_t tokens_to_read() const { return given_tokens - planned_end(); }
  bool reading() const { return tokens_to_read() > 0; }
  // A plan samples the last token, if no stop comes before it.
  bool is_planned_out() const { return generated() + unanswered_samples == spec.max_tokens; }
  // The next token is the first one of a block that is not taken yet.
  bool enters_block() const { return planned_end() == num_blocks() * kBlockTokens; }
  int64_t num_blocks() const { return static_cast<int64_t>(blocks.size()); }
  int64_t sealed_blocks() const { return static_cast<int64_t>(hashes.size()); }
  int64_t unsealed_blocks() const { return num_blocks() - sealed_blocks(); }
  // Chain value after the sealed blocks.
  const kvstore::PrefixHash& chain() const { return hashes.empty() ? scope : hashes.back(); }
  // Tokens of the index-th block, which is full.
  absl::Span<const int32_t> block_tokens(int64_t index) const {
    return absl::MakeConstSpan(tokens).subspan(static_cast<size_t>(index * kBlockTokens),
                                               static_cast<size_t>(kBlockTokens));
  }
  // True when generated tokens must be computed again one token a step: a window of less than a
  // block makes candidates of blocks that are not full, and these must not be ahead of the token.
  bool ReadsAnswerOneByOne() const {
    return generated() > 0 && IsSparse(spec.policy.decode) &&
           int64_t{spec.policy.decode.window_tokens()} < kBlockTokens;
  }
  // Number of blocks for the prompt and the longest answer. The last token needs no KV.
  int64_t blocks_at_most() const {
    return (prompt_tokens + spec.max_tokens - 1 + kBlockTokens - 1) / kBlockTokens;
  }
  int64_t blocks_to_read() const { return (given_tokens + kBlockTokens - 1) / kBlockTokens; }
  // Positions of the prompt whose next token's log probability is wanted: [0, to_score()). The last
  // position's next token is sampled.
  int64_t to_score() const { return spec.wants_prompt_logprobs ? prompt_tokens - 1 : 0; }
  // Tokens that cached blocks may stand in for, and one more. A position that is not scored yet is
  // computed, because blocks hold no logits. For a new sequence these are the tokens of the prompt
  // that other requests share. For a preempted or resumed one they are all its tokens, so that it
  // finds its own blocks again.
  absl::Span<const int32_t> matchable() const;
  // Number of a new sequence's prompt tokens in whole blocks that may be shared.
  int64_t shareable_tokens() const {
    return (static_cast<int64_t>(matchable().size()) - 1) / kBlockTokens * kBlockTokens;
  }
  // Number of the first blocks that peers may have: those that may be shared, and while another
  // server reads the prompt those that it has sealed.
  int64_t blocks_at_peers() const {
    const int64_t shareable = shareable_tokens() / kBlockTokens;
    return read_elsewhere.has_value() ? std::min(shareable, *read_elsewhere / kBlockTokens)
                                      : shareable;
  }
  bool IsStopToken(int32_t token) const;

  // Takes one block more. REQUIRES: as BlockReservation::Take.
  kvstore::BlockId TakeBlock();
  // Gives all blocks except the first `num_to_keep` back, and reserves as many again.
  void GiveBackBlocks(int64_t num_to_keep);
  // Gives the index-th block back, which is lost: those after it become later blocks.
  void LoseBlock(int64_t index);
  // Takes one block more, as the later block `index`. REQUIRES: as TakeBlock; after the others.
  kvstore::BlockId TakeLaterBlock(int64_t index, const kvstore::PrefixHash& hash);
  // Gives the later blocks from `index` on back.
  void GiveBackLaterBlocks(int64_t index);
  // Returns the index of the first block after the n-th gap among the blocks, if there are so many.
  // Gaps are computed, and each costs a start.
  std::optional<int64_t> BlockAfterGap(int64_t n) const;
  // All blocks before the next later one are sealed.
  bool meets_later_block() const {
    return !later_blocks.empty() && sealed_blocks() == later_blocks.front().index;
  }
  // Takes the later blocks that it meets among its own. REQUIRES: meets_later_block().
  void JoinLaterBlocks();
  // Lets others find the index-th block. False when it stays private to its holders, as in
  // PrefixIndex::Publish. REQUIRES: its hash is known.
  bool Publish(int64_t index, kvstore::PrefixIndex& prefix_index) const;

  // Forgets what it had to do with the ranks of a group that is lost. REQUIRES: it waits.
  void LeaveGroup();

  // A row may be the first start of its sequence, the start after a gap, or neither.
  enum class RowKind { kFirst, kJoin, kOther };
  RowKind KindOfRow(bool starts) const;
  // Adds what the ranks report of one row.
  void Account(const v1::RowAccounting& row, RowKind kind);
  void CountCached(const v1::RowAccounting& row, RowKind kind);
  AttentionSoFar AttentionUntilNow() const;
  // `unmeasured`: why the ranks measure no attention mass, as in v1::Ready.
  v1::AttentionReport Report(v1::MassUnmeasured unmeasured) const;
  // Returns the ranks' scores with the tokens, which the ranks leave out.
  v1::PromptLogprobs Scores(v1::PromptLogprobs scores) const;
  // The reply's summary. `now` is the end of the sequence.
  v1::Finish Summary(v1::FinishReason reason, v1::MassUnmeasured unmeasured, TimePoint now) const;

  SequenceSpec spec;  // without prompt and answer, which are the start of tokens
  const int64_t prompt_tokens;
  const int64_t resumed_tokens;  // of spec.answer
  const int64_t private_begin;   // PrivateBegin
  const kvstore::DecodePart decode_part;
  const kvstore::PrefixHash scope;  // start of the chain
  const kvstore::PrefixHash owner;  // of its blocks
  std::vector<int32_t> tokens;

  State state = State::kWaiting;  // changed by SequenceTable only
  int64_t slot = -1;              // -1: none
  int64_t given_tokens;
  int64_t preemptions = 0;
  int64_t joins = 0;  // those of them that took later blocks
  int64_t computed = 0;
  int64_t unanswered_tokens = 0;   // number of tokens that unanswered plans compute
  int64_t unanswered_samples = 0;  // number of tokens that they sample
  std::vector<kvstore::Block> blocks;
  std::vector<kvstore::PrefixHash> hashes;  // chain value after each sealed or restored block
  std::vector<LaterBlock> later_blocks;     // by index
  BlockReservation reservation;             // for the blocks that it may still take

  // While another server reads the prompt: number of its first tokens that are sealed there.
  std::optional<int64_t> read_elsewhere;
  bool is_read_further = false;  // it has been read further since peers were last asked
  bool restore_tried = false;    // it has asked for stored blocks; they are asked for once
  // The sequence is not looked at while another one restores this block.
  std::optional<kvstore::PrefixHash> waits_for;
  // Number of prompts that had been read when it was last found too long to pass another one.
  std::optional<int64_t> long_since;

  bool observe = false;  // the next row tells which pages it selects

  bool is_damaged = false;  // a rank found its KV damaged: the next plan takes its slot away
  std::optional<int64_t> generated_at_damage;  // generated() when that was last so

  bool is_planned = false;        // a plan of this group has named it
  int64_t generated_at_loss = 0;  // generated() when a group was last lost that had planned it
  int64_t reported_at_loss = 0;   // likewise reported_tokens
  int64_t losses = 0;             // of such groups in a row, in which it got no further

  int64_t scored = 0;           // positions of the prompt that have been scored
  int64_t reported_tokens = 0;  // the furthest progress that the client was told
  int64_t cached_tokens = 0;    // number of prompt tokens that were not computed
  int64_t known_tokens = 0;     // the same with those that the disk was asked for
  v1::CachedTokens cached_by_tier;
  v1::PhaseAccounting prefill, decode;  // by the parts of the policy
  v1::MassSamples estimated_mass;
  v1::ContractReport contract;
  uint64_t disk_page_waits = 0;
  double disk_wait_s = 0;
  uint64_t attended_tokens = 0;  // in decoding, summed over attending_rows
  uint64_t attending_rows = 0;
  std::optional<uint32_t> matched_stop_token;
  std::optional<TimePoint> restores_since;  // set while it waits for blocks, kept by its admission
  std::optional<TimePoint> admitted_at;
  std::optional<TimePoint> first_token_at;
  TimePoint last_token_at;
};

}  // namespace kvasir::coordinator
