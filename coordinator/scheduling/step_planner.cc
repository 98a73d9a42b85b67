#include "coordinator/scheduling/step_planner.h"

#include <algorithm>
#include <deque>
#include <utility>

#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

using kvstore::StoredLink;

// When a request joins others, one in this many blocks is left free for their next tokens.
constexpr int64_t kWatermark = 64;

// Number of waiting requests that one plan looks at for short ones: their cached prefix is looked
// up by hash.
constexpr int64_t kMostLookedAt = 16;

bool SomeDecode(const std::vector<Sequence*>& running) {
  return std::any_of(running.begin(), running.end(),
                     [](const Sequence* sequence) { return !sequence->reading(); });
}

}  // namespace

StepPlanner::StepPlanner(SchedulerState& state, When when, TimePoint now)
    : state_(state),
      when_(when),
      now_(now),
      plan_(state.options, now, SomeDecode(state.sequences.running())) {}

bool StepPlanner::MayPlanAhead(const SchedulerState& state, const UnansweredPlan& before) {
  const SequenceTable& sequences = state.sequences;
  if (before.starts_sequences || state.contexts.has_wishes()) return false;
  if (before.prefill_tokens > 0 && !sequences.waiting().empty()) return false;
  int64_t rows = 0, new_blocks = 0, unreserved_blocks = 0;
  for (const Sequence* sequence : sequences.running()) {
    if (sequence->is_damaged) return false;
    if (sequence->is_planned_out()) continue;
    ++rows;
    if (sequence->reading() || !sequence->enters_block()) continue;
    ++new_blocks;
    if (sequence->reservation.num_blocks() == 0) ++unreserved_blocks;
  }
  return rows > 0 && unreserved_blocks <= state.blocks.unreserved() &&
         sequences.unsealed_blocks() + new_blocks <= state.device_share;
}

std::optional<PlannedStep> StepPlanner::Plan(uint64_t step) {
  state_.restores.GiveUpLate(now_);
  PreemptDamaged();
  for (Sequence* sequence : state_.sequences.running()) {
    SealFullBlocks(*sequence, Unpublished::kSeal);
  }
  ReleaseEnded();
  if (when_ == When::kAnswered) state_.contexts.AddTo(plan_);
  state_.exchange.AddTo(plan_);
  PlanDecodes();
  plan_.set_device_blocks(state_.device_share - state_.sequences.unsealed_blocks());
  PlanPassing();
  PlanPrompts();
  AdmitRestored();
  AdmitWaiting();
  FetchFromElsewhere();
  plan_.AddDrops(state_.blocks.index().TakeDropped());
  return plan_.Commit(step);
}

// --- blocks that are full -----------------------------------------------------------------------

void StepPlanner::SealFullBlocks(Sequence& sequence, Unpublished unpublished) {
  const int64_t full = sequence.computed / kBlockTokens;
  for (int64_t i = sequence.sealed_blocks(); i < full; ++i) {
    const auto key = sequence.decode_part.KeyOf(i);
    sequence.hashes.push_back(kvstore::HashBlock(sequence.chain(), sequence.block_tokens(i), key));
    // A block that depends on the decode part is of use to this sequence only, once it is
    // preempted.
    const bool published = state_.options.enable_prefix_caching && key.empty() &&
                           sequence.Publish(i, state_.blocks.index());
    if (published || unpublished == Unpublished::kSeal) plan_.AddSeal(sequence, i);
  }
}

// The ranks leave out blocks that they store already, and blocks that they never sealed because
// equal ones are cached.
void StepPlanner::PersistBlocks(const Sequence& sequence, int64_t num_blocks) {
  if (!state_.options.persists()) return;
  for (int64_t i = 0; i < num_blocks; ++i) {
    if (state_.restores.HeldByAll(sequence.hashes[static_cast<size_t>(i)])) continue;
    plan_.AddPersist(sequence, i);
  }
}

void StepPlanner::ReleaseEnded() {
  for (const SequenceTable::Ended& ended : state_.sequences.ended()) {
    Sequence& sequence = *ended.sequence;
    if (sequence.slot < 0) continue;  // its start was taken back
    if (ended.blocks == SequenceTable::Blocks::kKeep) {
      SealFullBlocks(sequence, Unpublished::kLeaveOut);
      const int64_t shareable = sequence.private_begin / kBlockTokens;
      PersistBlocks(sequence, std::min(sequence.sealed_blocks(), shareable));
    }
    plan_.AddFreeSlot(sequence.slot);
  }
  state_.sequences.FreeEnded();
}

// --- decoding, and making room for it -----------------------------------------------------------

void StepPlanner::PlanDecodes() {
  const std::vector<Sequence*>& running = state_.sequences.running();
  for (size_t i = 0; i < running.size(); ++i) {  // preempting takes the last ones out
    Sequence& sequence = *running[i];
    if (sequence.reading() || sequence.is_planned_out()) continue;
    if (MakeRoomForToken(sequence)) plan_.AddRow(sequence, 1);
  }
}

bool StepPlanner::MakeRoomForToken(Sequence& sequence) {
  if (!sequence.enters_block() || sequence.reservation.num_blocks() > 0) return true;
  while (state_.blocks.unreserved() <= 0) {
    KVASIR_CHECK(when_ == When::kAnswered);  // by MayPlanAhead
    Sequence& victim = Youngest();
    Preempt(victim);
    if (&victim == &sequence) return false;
  }
  return true;
}

// The youngest of the sequences that hold blocks. It may be the only one: blocks that it computed
// at the same time as another sequence are held twice, until it takes the cached ones.
Sequence& StepPlanner::Youngest() const {
  Sequence* youngest = state_.sequences.running().back();
  for (Sequence* sequence : state_.restores.Sequences()) {
    if (youngest->spec.id < sequence->spec.id) youngest = sequence;
  }
  return *youngest;
}

void StepPlanner::Preempt(Sequence& sequence) {
  if (sequence.state == Sequence::State::kRunning) {
    SchedulerStats& counters = state_.counters;
    KeepFindable(sequence);
    plan_.AddFreeSlot(sequence.slot);
    ++(state_.options.persists() ? counters.preempted_swap : counters.preempted_recompute);
  }
  state_.sequences.Preempt(sequence);
  state_.last_misfit = {};
}

// The ranks forget what is damaged, and say so when a plan names it (missing_blocks). What is sound
// of it can be found again.
void StepPlanner::PreemptDamaged() {
  const std::vector<Sequence*> running = state_.sequences.running();  // a copy: Preempt changes it
  for (Sequence* sequence : running) {
    if (!sequence->is_damaged) continue;
    plan_.AddFreeSlot(sequence->slot);
    ++state_.counters.preempted_damage;
    state_.sequences.Preempt(*sequence);
    state_.last_misfit = {};
  }
}

// Full blocks can be found again, by this sequence or by one that would compute the same, until
// their room is needed; on disk beyond that. Plan has sealed them before.
void StepPlanner::KeepFindable(const Sequence& sequence) {
  if (!state_.options.enable_prefix_caching) return;
  for (int64_t i = 0; i < sequence.sealed_blocks(); ++i) {
    sequence.Publish(i, state_.blocks.index());
  }
  PersistBlocks(sequence, sequence.sealed_blocks());
}

// --- prompts ------------------------------------------------------------------------------------

void StepPlanner::PlanPassing() {
  const std::vector<Sequence*>& running = state_.sequences.running();
  const auto oldest = std::find_if(running.begin(), running.end(),
                                   [](const Sequence* sequence) { return sequence->reading(); });
  if (oldest == running.end()) return;
  const StepBudget half = plan_.budget().Half();
  const StepBudget rest = plan_.budget() - half;
  plan_.set_budget(half);
  for (auto it = oldest + 1; it != running.end(); ++it) {
    Sequence& sequence = **it;
    if (!sequence.reading()) continue;
    const int64_t tokens = sequence.tokens_to_read();
    if (plan_.ChunkTokens(sequence) == tokens) plan_.AddRow(sequence, tokens);
  }
  AdmitShort();
  plan_.set_budget(plan_.budget() + rest);
}

void StepPlanner::AdmitShort() {
  const std::deque<Sequence*>& waiting = state_.sequences.waiting();
  int64_t looked_at = 0;
  for (size_t i = 0; i < waiting.size() && looked_at < kMostLookedAt; ++looked_at) {
    // One slot is left to the head of the queue.
    if (state_.sequences.num_holding() + 1 >= state_.max_running) return;
    Sequence& sequence = *waiting[i];
    if (IsOnItsWay(sequence) || !plan_.HasRoomFor(sequence) ||
        !IsShort(sequence, plan_.budget().tokens) ||
        (i > 0 && !LeavesRoomFor(*waiting.front(), sequence))) {
      ++i;
      continue;
    }
    if (!AdmitOrSkip(i)) return;
  }
}

// A long prompt may be cached except for its end. That is looked up again after another prompt was
// read, which may have been the same.
bool StepPlanner::IsShort(Sequence& sequence, int64_t tokens) const {
  if (sequence.given_tokens <= tokens) return true;
  if (!state_.options.enable_prefix_caching) return false;
  if (sequence.long_since == state_.prompts_read) return false;
  const kvstore::PrefixMatch match =
      state_.blocks.index().Match(sequence.scope, sequence.matchable(), sequence.decode_part);
  const auto cached = static_cast<int64_t>(match.blocks.size()) * kBlockTokens;
  if (sequence.given_tokens - cached <= tokens) return true;
  sequence.long_since = state_.prompts_read;
  return false;
}

bool StepPlanner::LeavesRoomFor(const Sequence& head, const Sequence& passing) const {
  return head.blocks_to_read() + passing.blocks_to_read() + SpareBlocks() <=
         state_.blocks.unreserved();
}

void StepPlanner::PlanPrompts() {
  for (Sequence* sequence : state_.sequences.running()) {
    if (!sequence->reading() || plan_.HasRow(*sequence)) continue;
    if (sequence->meets_later_block()) {
      if (plan_.HasRoomFor(*sequence)) GoOnAfter(*sequence);
      continue;
    }
    const int64_t num_tokens = plan_.ChunkTokens(*sequence);
    if (num_tokens > 0) plan_.AddRow(*sequence, num_tokens);
  }
}

void StepPlanner::GoOnAfter(Sequence& sequence) {
  plan_.AddFreeSlot(sequence.slot);
  ++sequence.preemptions;
  ++sequence.joins;
  ++state_.counters.preempted_restore;
  const int64_t joined = sequence.num_blocks();
  sequence.JoinLaterBlocks();
  for (int64_t i = joined; i < sequence.num_blocks(); ++i) {
    sequence.Publish(i, state_.blocks.index());
  }
  plan_.AddStart(sequence);
}

// --- admission ----------------------------------------------------------------------------------

// Each is looked at once for every news of it: where it has no room now, it may have with the next.
void StepPlanner::FetchFromElsewhere() {
  const std::vector<Sequence*> elsewhere = state_.sequences.elsewhere();  // a copy: some leave it
  for (Sequence* sequence : elsewhere) {
    if (state_.sequences.num_holding() >= state_.max_running) return;
    if (std::exchange(sequence->is_read_further, false)) TryReserve(*sequence);
  }
}

// They were at the head of the queue when they began to restore.
void StepPlanner::AdmitRestored() {
  for (Sequence* sequence : state_.restores.Ready(now_)) {
    if (AskOn(*sequence) || sequence->read_elsewhere.has_value()) continue;
    if (!plan_.HasRoomFor(*sequence)) return;
    Admit(*sequence);
  }
}

bool StepPlanner::AskOn(Sequence& sequence) {
  const RestoreBook::Restorable more = state_.restores.MatchOn(sequence, now_);
  if (more.links.empty()) return false;
  const int64_t begin = sequence.num_blocks();
  state_.restores.Continue(sequence, more, now_);
  AddRestores(sequence, begin);
  return true;
}

void StepPlanner::AddRestores(const Sequence& sequence, int64_t begin) {
  for (int64_t i = begin; i < sequence.num_blocks(); ++i) {
    const auto own = static_cast<size_t>(i);
    plan_.AddRestore(sequence, sequence.blocks[own].id(), sequence.hashes[own]);
  }
  for (const Sequence::LaterBlock& later : sequence.later_blocks) {
    plan_.AddRestore(sequence, later.block.id(), later.hash);
  }
}

void StepPlanner::AdmitWaiting() {
  const std::deque<Sequence*>& waiting = state_.sequences.waiting();
  for (size_t i = 0; i < waiting.size();) {
    Sequence& sequence = *waiting[i];
    if (state_.sequences.num_holding() >= state_.max_running) return;
    if (IsOnItsWay(sequence)) {
      ++i;
      continue;
    }
    if (!plan_.HasRoomFor(sequence)) return;
    if (!AdmitOrSkip(i)) return;
  }
}

bool StepPlanner::IsOnItsWay(const Sequence& sequence) const {
  return sequence.waits_for.has_value() && state_.restores.IsAwaited(*sequence.waits_for);
}

bool StepPlanner::AdmitOrSkip(size_t& i) {
  Sequence& sequence = *state_.sequences.waiting()[i];
  const Reserved reserved = TryReserve(sequence);
  if (reserved == Reserved::kReady) Admit(sequence);
  if (reserved == Reserved::kLater) ++i;
  return reserved != Reserved::kNoRoom;
}

// The blocks that the sequence has by now are those of its cached prefix. Those after a gap are not
// computed either.
void StepPlanner::Admit(Sequence& sequence) {
  sequence.computed = sequence.num_blocks() * kBlockTokens;
  if (sequence.preemptions == 0) {
    sequence.cached_tokens = std::min(sequence.computed, sequence.prompt_tokens);
    for (const Sequence::LaterBlock& later : sequence.later_blocks) {
      if (later.index < sequence.prompt_tokens / kBlockTokens)
        sequence.cached_tokens += kBlockTokens;
    }
    sequence.admitted_at = now_;
  }
  state_.sequences.Run(sequence);
  plan_.AddStart(sequence);
  state_.ReportProgress(sequence, events_);
}

StepPlanner::Reserved StepPlanner::TryReserve(Sequence& sequence) {
  BlockBudget& blocks = state_.blocks;
  const int64_t unreserved = blocks.unreserved();
  if (state_.last_misfit.id == sequence.spec.id &&
      unreserved <= state_.last_misfit.unreserved_blocks) {
    return Reserved::kNoRoom;
  }
  kvstore::PrefixMatch match;
  if (state_.options.enable_prefix_caching) {
    match = blocks.index().Match(sequence.scope, sequence.matchable(), sequence.decode_part);
  }
  const RestoreBook::Restorable found = state_.restores.Match(sequence, match, now_);
  const auto on_its_way =
      std::find_if(found.links.begin(), found.links.end(),
                   [this](const StoredLink& link) { return state_.restores.IsAwaited(link.hash); });
  if (on_its_way != found.links.end()) {
    sequence.waits_for = on_its_way->hash;
    return Reserved::kLater;
  }
  if (found.links.empty() && sequence.read_elsewhere.has_value()) return Reserved::kLater;
  const int64_t needed = sequence.blocks_to_read() - static_cast<int64_t>(match.blocks.size());
  // Asked again: matched blocks that were idle are no longer available.
  if (needed + SpareBlocks() > blocks.unreserved()) {
    state_.last_misfit = {.id = sequence.spec.id, .unreserved_blocks = unreserved};
    return Reserved::kNoRoom;
  }
  sequence.reservation = blocks.Reserve(needed);
  sequence.blocks = std::move(match.blocks);
  sequence.hashes = std::move(match.hashes);
  if (found.links.empty()) return Reserved::kReady;
  const int64_t cached = sequence.num_blocks();
  state_.sequences.Restore(sequence, found, now_);
  const auto stored_end = found.links.begin() + found.stored;
  const int64_t held = std::count_if(found.links.begin(), stored_end,
                                     [](const StoredLink& link) { return link.held; });
  sequence.known_tokens = (cached + held) * kBlockTokens;
  AddRestores(sequence, cached);
  return Reserved::kRestoring;
}

int64_t StepPlanner::SpareBlocks() const {
  return state_.sequences.num_holding() == 0 ? 0 : 1 + state_.blocks.capacity() / kWatermark;
}

}  // namespace kvasir::coordinator
