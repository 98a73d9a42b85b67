#include "coordinator/scheduling/plan_builder.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

using kvstore::BlockId;

// Tokens of one prompt that a step scores at most. Their log probabilities reach the client's
// stream at once, and a stream in which 1 MiB waits is given up: this is a twelfth of it.
constexpr int64_t kMostScored = 512;

// Beside decoding sequences a chunk is no more work than a whole one after this many tokens.
constexpr int64_t kReferenceContext = 4096;

absl::Status CheckScores(uint64_t step, const PlannedRow& row, const v1::PromptLogprobs& scores) {
  const int64_t due = row.score_end - row.score_begin;
  if (scores.logprobs_size() == due &&
      (due == 0 || int64_t{scores.index()} == row.score_begin + 1) &&
      scores.top_token_ids_size() == due * row.top_count &&
      scores.top_logprobs_size() == due * row.top_count) {
    return absl::OkStatus();
  }
  return absl::InternalError(
      absl::StrCat("step ", step, " answers slot ", row.slot, " with ", scores.logprobs_size(),
                   " log probabilities of the prompt from token ", scores.index(), " on, and ",
                   scores.top_token_ids_size(), " most probable tokens; ", due, " from ",
                   row.score_begin + 1, " on were due, with ", row.top_count, " each"));
}

absl::Status CheckResult(uint64_t step, const PlannedRow& row, const v1::RowResult& result,
                         int64_t vocab_size) {
  if (result.slot() != static_cast<uint32_t>(row.slot)) {
    return absl::InternalError(absl::StrCat("step ", step, " has a result for slot ", result.slot(),
                                            " in place of slot ", row.slot));
  }
  if (result.error_code() != 0) return absl::OkStatus();
  KVASIR_RETURN_IF_ERROR(CheckScores(step, row, result.prompt_logprobs()));
  if (result.has_token_id() != row.sample ||
      (row.sample && result.token_id() >= static_cast<uint64_t>(vocab_size))) {
    return absl::InternalError(absl::StrCat(
        "step ", step, " answers slot ", row.slot, " with ",
        result.has_token_id() ? absl::StrCat("token ", result.token_id()) : "no token", "; ",
        row.sample ? absl::StrCat("a token below ", vocab_size) : "none", " was due"));
  }
  return absl::OkStatus();
}

v1::StepRow ToProto(const PlannedRow& row) {
  v1::StepRow proto;
  proto.set_slot(static_cast<uint32_t>(row.slot));
  proto.set_begin(static_cast<uint32_t>(row.begin));
  proto.set_num_tokens(static_cast<uint32_t>(row.num_tokens));
  proto.set_sample(row.sample);
  proto.set_score_begin(static_cast<uint32_t>(row.score_begin));
  proto.set_score_end(static_cast<uint32_t>(row.score_end));
  proto.set_observe(row.observe);
  for (const BlockId id : row.new_blocks) proto.add_new_blocks(static_cast<uint64_t>(id.value));
  return proto;
}

v1::SequenceStart MakeStart(const Sequence& sequence) {
  v1::SequenceStart start;
  start.set_slot(static_cast<uint32_t>(sequence.slot));
  start.set_sequence_id(static_cast<uint64_t>(sequence.spec.id.value));
  start.mutable_tokens()->Reserve(static_cast<int>(sequence.length()));
  for (int32_t token : sequence.tokens) start.add_tokens(static_cast<uint32_t>(token));
  start.set_num_prompt_tokens(static_cast<uint32_t>(sequence.prompt_tokens));
  for (const kvstore::Block& block : sequence.blocks) {
    start.add_cached_blocks(static_cast<uint64_t>(block.id().value));
  }
  *start.mutable_sampling() = sequence.spec.sampling;
  const ResolvedPolicy& policy = sequence.spec.policy;
  start.set_policy_index(policy.index);
  *start.mutable_prefill() = policy.prefill;
  *start.mutable_decode() = policy.decode;
  start.set_tail_tokens(policy.tail_tokens);
  return start;
}

}  // namespace

absl::Status UnansweredPlan::CheckResults(const v1::StepReply& reply, int64_t vocab_size) const {
  if (static_cast<size_t>(reply.results_size()) != rows.size()) {
    return absl::InternalError(absl::StrCat("step ", step, " has ", rows.size(), " rows and ",
                                            reply.results_size(), " results"));
  }
  for (size_t i = 0; i < rows.size(); ++i) {
    KVASIR_RETURN_IF_ERROR(
        CheckResult(step, rows[i], reply.results(static_cast<int>(i)), vocab_size));
  }
  return absl::OkStatus();
}

PlanBuilder::PlanBuilder(const SchedulerOptions& options, TimePoint now, bool decodes)
    : options_(options) {
  const int64_t whole_chunk =
      options.max_num_batched_tokens * (options.attention_parity_tokens + kReferenceContext);
  budget_ = {.tokens = options.max_num_batched_tokens,
             .work = decodes ? whole_chunk : std::numeric_limits<int64_t>::max()};
  unanswered_.planned_at = now;
}

// Work of each token of the sequence's next chunk, in units of attending to one token.
int64_t PlanBuilder::WorkPerToken(const Sequence& sequence) const {
  const v1::AttentionPolicy& prefill = sequence.spec.policy.prefill;
  int64_t attended = sequence.planned_end() + kBlockTokens;
  if (IsSparse(prefill)) {
    attended = std::min(attended, int64_t{prefill.sink_tokens()} + prefill.window_tokens() +
                                      prefill.token_budget() + kBlockTokens);
  }
  return options_.attention_parity_tokens + attended;
}

int64_t PlanBuilder::ChunkTokens(const Sequence& sequence) const {
  int64_t rest = sequence.tokens_to_read();
  if (sequence.ReadsAnswerOneByOne()) {
    rest = std::max<int64_t>(1, sequence.prompt_tokens - sequence.planned_end());
  }
  if (!sequence.later_blocks.empty()) {
    rest =
        std::min(rest, sequence.later_blocks.front().index * kBlockTokens - sequence.planned_end());
  }
  if (sequence.planned_end() < sequence.to_score()) rest = std::min(rest, kMostScored);
  if (budget_.work <= 0 || budget_.device_blocks <= 0) return 0;
  const int64_t affordable = std::max(kBlockTokens, budget_.work / WorkPerToken(sequence));
  const int64_t room = std::min({budget_.tokens, budget_.device_blocks * kBlockTokens, affordable});
  return rest <= room ? rest : room / kBlockTokens * kBlockTokens;
}

bool PlanBuilder::HasRoomFor(const Sequence& sequence) const {
  return budget_.tokens >= std::min(sequence.given_tokens, kBlockTokens) &&
         budget_.device_blocks >= 1 && budget_.work > 0;
}

bool PlanBuilder::HasRow(const Sequence& sequence) const {
  return std::any_of(unanswered_.rows.begin(), unanswered_.rows.end(),
                     [&](const PlannedRow& row) { return row.id == sequence.spec.id; });
}

void PlanBuilder::AddRow(Sequence& sequence, int64_t num_tokens) {
  const int64_t begin = sequence.planned_end();
  const int64_t end = begin + num_tokens;
  PlannedRow row = {.id = sequence.spec.id,
                    .slot = sequence.slot,
                    .begin = begin,
                    .num_tokens = num_tokens,
                    .blocks_before = sequence.num_blocks(),
                    .new_blocks = {},
                    .sample = end == sequence.planned_length(),
                    .observe = std::exchange(sequence.observe, false)};
  if (const int64_t score_end = std::min(end, sequence.to_score());
      std::max(begin, sequence.scored) < score_end) {
    row.score_begin = std::max(begin, sequence.scored);
    row.score_end = score_end;
    row.top_count =
        std::min(int64_t{sequence.spec.sampling.prompt_logprobs()}, options_.vocab_size);
  }
  if (sequence.reading()) {
    unanswered_.prefill_tokens += num_tokens;
    budget_.work -= num_tokens * WorkPerToken(sequence);
  }
  while (sequence.num_blocks() * kBlockTokens < end) row.new_blocks.push_back(sequence.TakeBlock());
  budget_.device_blocks -= static_cast<int64_t>(row.new_blocks.size());
  budget_.tokens -= num_tokens;
  sequence.unanswered_tokens += num_tokens;
  sequence.unanswered_samples += row.sample ? 1 : 0;
  unanswered_.rows.push_back(std::move(row));
}

void PlanBuilder::AddStart(Sequence& sequence) {
  *plan_.add_starts() = MakeStart(sequence);
  AddRow(sequence, ChunkTokens(sequence));
  unanswered_.rows.back().starts = true;
  unanswered_.starts_sequences = true;
}

void PlanBuilder::AddFreeSlot(int64_t slot) { plan_.add_free_slots(static_cast<uint32_t>(slot)); }

void PlanBuilder::AddSeal(const Sequence& sequence, int64_t index) {
  const BlockId id = sequence.blocks[static_cast<size_t>(index)].id();
  const kvstore::PrefixHash& hash = sequence.hashes[static_cast<size_t>(index)];
  v1::BlockSeal& seal = *plan_.add_seals();
  seal.set_block_id(static_cast<uint64_t>(id.value));
  seal.set_prefix_hash(hash.data(), hash.size());
  seal.set_owner(sequence.owner.data(), sequence.owner.size());
  unanswered_.sealed.push_back(id);
}

void PlanBuilder::AddPersist(const Sequence& sequence, int64_t index) {
  AddPersist(sequence.blocks[static_cast<size_t>(index)].id(), sequence.block_tokens(index));
}

void PlanBuilder::AddPersist(BlockId id, absl::Span<const int32_t> tokens) {
  v1::BlockPersist& persist = *plan_.add_persists();
  persist.set_block_id(static_cast<uint64_t>(id.value));
  for (int32_t token : tokens) persist.add_tokens(static_cast<uint32_t>(token));
}

void PlanBuilder::AddRestore(const Sequence& sequence, BlockId id,
                             const kvstore::PrefixHash& hash) {
  v1::BlockRestore& restore = *plan_.add_restores();
  restore.set_block_id(static_cast<uint64_t>(id.value));
  restore.set_prefix_hash(hash.data(), hash.size());
  restore.set_owner(sequence.owner.data(), sequence.owner.size());
}

void PlanBuilder::AddDrops(const std::vector<BlockId>& blocks) {
  for (const BlockId id : blocks) plan_.add_drop_blocks(static_cast<uint64_t>(id.value));
}

std::optional<PlannedStep> PlanBuilder::Commit(uint64_t step) {
  if (IsEmpty()) return std::nullopt;
  plan_.set_group_epoch(options_.group_epoch);
  plan_.set_step(step);
  for (const PlannedRow& row : unanswered_.rows) *plan_.add_rows() = ToProto(row);
  unanswered_.step = step;
  return PlannedStep{.plan = std::move(plan_), .unanswered = std::move(unanswered_)};
}

bool PlanBuilder::IsEmpty() const {
  return unanswered_.rows.empty() && plan_.seals().empty() && plan_.free_slots().empty() &&
         plan_.persists().empty() && plan_.drop_blocks().empty() && plan_.restores().empty() &&
         plan_.erases().empty() && plan_.exports().empty() && plan_.imports().empty() &&
         plan_.disk_pins().empty() && plan_.disk_unpins().empty();
}

}  // namespace kvasir::coordinator
