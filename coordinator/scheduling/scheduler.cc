#include "coordinator/scheduling/scheduler.h"

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"

#include "coordinator/scheduling/step_planner.h"
#include "kernels/base/status_macros.h"
#include "proto/grpc_status.h"

namespace kvasir::coordinator {
namespace {

using kvstore::Block;
using kvstore::BlockId;
using kvstore::PrefixHash;

// Bounds of the time that a refused client is told to wait.
constexpr absl::Duration kShortestRetry = absl::Seconds(1);
constexpr absl::Duration kLongestRetry = absl::Seconds(60);

absl::Status RowError(const v1::RowResult& result) {
  const auto code = static_cast<absl::StatusCode>(result.error_code());
  return absl::Status(code, absl::StrCat("a worker reports: ", result.error_message()));
}

BlockId ToBlockId(uint64_t id) { return BlockId(static_cast<int64_t>(id)); }

}  // namespace

absl::StatusOr<std::unique_ptr<Scheduler>> Scheduler::Create(
    const SchedulerOptions& options, std::unique_ptr<kvstore::PrefixIndex> index) {
  KVASIR_CHECK(options.num_ranks >= 1);
  if (options.device_blocks < 1 || index->stats().capacity_blocks < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("the workers hold ", options.device_blocks, " blocks in the device tier and ",
                     index->stats().capacity_blocks,
                     " in the host tier; raise --kv-device-size-gb or --kv-host-size-gb"));
  }
  if (options.max_num_seqs < 1 || options.max_num_batched_tokens < kBlockTokens ||
      options.max_num_batched_tokens % kBlockTokens != 0 || options.max_queue_len < 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "max_num_seqs is ", options.max_num_seqs, ", max_num_batched_tokens ",
        options.max_num_batched_tokens, ", max_queue_len ", options.max_queue_len,
        "; needed: at least 1, a positive multiple of ", kBlockTokens, ", at least 0"));
  }
  return std::unique_ptr<Scheduler>(new Scheduler(options, std::move(index)));
}

// --- requests -----------------------------------------------------------------------------------

absl::Status Scheduler::Add(SequenceSpec spec) {
  KVASIR_CHECK(!spec.prompt.empty() && spec.max_tokens >= 1);
  KVASIR_RETURN_IF_ERROR(CheckQueue(std::ssize(spec.prompt) + std::ssize(spec.answer)));
  const PrefixHash scope = ScopeOf(spec);
  auto sequence = std::make_unique<Sequence>(std::move(spec), scope);
  KVASIR_RETURN_IF_ERROR(CheckFits(*sequence));
  state_.sequences.Add(std::move(sequence));
  return absl::OkStatus();
}

absl::Status Scheduler::CheckFits(const Sequence& sequence) const {
  const int64_t capacity = state_.blocks.capacity();
  if (sequence.blocks_at_most() <= capacity) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("a prompt of ", sequence.prompt_tokens, " tokens and max_tokens of ",
                   sequence.spec.max_tokens, " need ", sequence.blocks_at_most(), " blocks of ",
                   kBlockTokens, " tokens, the host tier of a worker holds ", capacity,
                   "; shorten the prompt, lower max_tokens, or raise --kv-host-size-gb"));
}

absl::Status Scheduler::CheckQueue(int64_t prompt_tokens) const {
  const SequenceTable& sequences = state_.sequences;
  const int64_t startable = state_.max_running - sequences.num_holding();
  const int64_t waiting = static_cast<int64_t>(sequences.waiting().size());
  const int64_t waiting_tokens = sequences.waiting_tokens();
  absl::Status full;
  if (waiting >= state_.options.max_queue_len + startable) {
    full = absl::ResourceExhaustedError(
        absl::StrCat(waiting, " requests wait and ", sequences.running().size(),
                     " run; try again later, or raise ", "--max-queue-len"));
  } else if (waiting > 0 && waiting_tokens + prompt_tokens > state_.options.max_queued_tokens) {
    full = absl::ResourceExhaustedError(absl::StrCat(
        waiting, " requests with ", waiting_tokens, " prompt tokens wait, and this one has ",
        prompt_tokens, "; at most ", state_.options.max_queued_tokens,
        " may wait: try again later, or raise --max-queued-tokens"));
  }
  if (full.ok()) return full;
  // About the time at which one of the waiting prompts has been read.
  const double mean_tokens =
      static_cast<double>(waiting_tokens) / static_cast<double>(std::max<int64_t>(1, waiting));
  return proto::WithRetryDelay(
      full, std::clamp(state_.prefill_rate.TimeFor(mean_tokens), kShortestRetry, kLongestRetry));
}

std::optional<FinishEvent> Scheduler::Cancel(SequenceId id, const absl::Status& why,
                                             TimePoint now) {
  Sequence* sequence = state_.sequences.Find(id);
  if (sequence == nullptr) return std::nullopt;
  return End(*sequence, why, v1::FINISH_REASON_UNSPECIFIED, Blocks::kKeep, now);
}

std::optional<FinishEvent> Scheduler::StopEarly(SequenceId id, TimePoint now) {
  Sequence* sequence = state_.sequences.Find(id);
  if (sequence == nullptr) return std::nullopt;
  return End(*sequence, absl::OkStatus(), v1::FINISH_REASON_STOP, Blocks::kKeep, now);
}

FinishEvent Scheduler::End(Sequence& sequence, const absl::Status& status, v1::FinishReason reason,
                           Blocks blocks, TimePoint now) {
  FinishEvent event = {.id = sequence.spec.id,
                       .status = status,
                       .summary = sequence.Summary(reason, state_.options.mass_unmeasured, now)};
  state_.sequences.End(sequence, blocks);
  return event;
}

// --- from one group to the next -----------------------------------------------------------------

Survivors Scheduler::GiveUp() {
  for (const UnansweredPlan& plan : unanswered_) {
    for (const PlannedRow& row : plan.rows) {
      Sequence* sequence = row.starts ? state_.sequences.Find(row.id) : nullptr;
      if (sequence != nullptr) TakeBackStart(*sequence);
    }
  }
  unanswered_.clear();
  for (Sequence* sequence : state_.sequences.OldestFirst()) {
    state_.sequences.EndReadElsewhere(*sequence, {});
    if (sequence->state == Sequence::State::kRunning) ++state_.counters.preempted_loss;
    if (sequence->state != Sequence::State::kWaiting) state_.sequences.Preempt(*sequence);
    sequence->LeaveGroup();
  }
  state_.sequences.FreeEnded();
  state_.contexts.GiveUp();
  state_.exchange.GiveUp();
  return {state_.sequences.TakeAll(), state_.options.mass_unmeasured};
}

std::vector<Event> Scheduler::TakeOver(Survivors survivors, TimePoint now) {
  std::vector<Event> events;
  for (std::unique_ptr<Sequence>& taken : survivors.TakeAll()) {
    Sequence& sequence = *taken;
    state_.sequences.Add(std::move(taken));
    absl::Status refused = CheckFits(sequence);
    if (sequence.scope != ScopeOf(sequence.spec)) {
      refused = absl::UnavailableError(
          "the worker group was lost and came back with other weights or another form of KV, which "
          "would go on otherwise; send the request again");
    }
    if (refused.ok()) continue;
    events.emplace_back(
        End(sequence, refused, v1::FINISH_REASON_UNSPECIFIED, Blocks::kDiscard, now));
  }
  return events;
}

// --- plans --------------------------------------------------------------------------------------

Scheduler::Planned Scheduler::NextPlan(TimePoint now) {
  KVASIR_CHECK(unanswered_plans() < kMostPlans);
  const bool ahead = !unanswered_.empty();
  if (ahead && !StepPlanner::MayPlanAhead(state_, unanswered_.back())) return {};
  StepPlanner planner(state_, ahead ? StepPlanner::When::kAhead : StepPlanner::When::kAnswered,
                      now);
  std::optional<PlannedStep> step = planner.Plan(step_ + 1);
  Planned planned = {.plan = std::nullopt, .events = planner.TakeEvents()};
  if (!step.has_value()) return planned;
  ++step_;
  if (ahead) ++state_.counters.plans_ahead;
  unanswered_.push_back(std::move(step->unanswered));
  planned.plan = std::move(step->plan);
  return planned;
}

absl::Status Scheduler::OnTierReport(int64_t rank, const v1::TierReport& report, TimePoint now) {
  for (const v1::Erased& erased : report.erased()) state_.contexts.OnErasedBy(erased);
  for (const v1::ExportedBlock& block : report.exported()) state_.exchange.OnExportedBy(block);
  for (const v1::RestoredBlock& block : report.restored()) state_.exchange.OnRestoredBy(block);
  return state_.restores.OnReport(rank, report, now);
}

// --- replies ------------------------------------------------------------------------------------

absl::StatusOr<std::vector<Event>> Scheduler::OnReply(const v1::StepReply& reply, TimePoint now) {
  KVASIR_RETURN_IF_ERROR(CheckReply(reply));
  if (!reply.missing_blocks().empty()) return PlanWithout(reply, now);
  const UnansweredPlan plan = TakeOldest();
  // A plan that was made ahead began with the answer to the one before.
  const TimePoint begun = std::max(plan.planned_at, std::exchange(answered_at_, now));
  state_.prefill_rate.Add(plan.prefill_tokens, Between(begun, now));
  state_.restores.OnStep(Between(begun, now));
  std::vector<Event> events;
  for (size_t i = 0; i < plan.rows.size(); ++i) {
    ApplyRow(plan.rows[i], reply.results(static_cast<int>(i)), now, events);
  }
  return events;
}

absl::Status Scheduler::CheckReply(const v1::StepReply& reply) const {
  const uint64_t step = unanswered_.empty() ? step_ : unanswered_.front().step;
  const uint64_t epoch = state_.options.group_epoch;
  if (unanswered_.empty() || reply.group_epoch() != epoch || reply.step() != step) {
    return absl::InternalError(absl::StrCat("a reply to step ", reply.step(), " of epoch ",
                                            reply.group_epoch(), " came in step ", step,
                                            " of epoch ", epoch));
  }
  if (!reply.missing_blocks().empty()) return CheckMissing(reply);
  return unanswered_.front().CheckResults(reply, state_.options.vocab_size);
}

// Every missing block must be one that the plan named: else planning again would change nothing.
absl::Status Scheduler::CheckMissing(const v1::StepReply& reply) const {
  const UnansweredPlan& plan = unanswered_.front();
  if (unanswered_plans() > 1) {  // then this one starts nothing, by MayPlanAhead
    return absl::InternalError(absl::StrCat("step ", plan.step, " misses ",
                                            reply.missing_blocks_size(),
                                            " blocks, but does not start on any"));
  }
  absl::flat_hash_set<BlockId> named(plan.sealed.begin(), plan.sealed.end());
  for (const Sequence* sequence : state_.sequences.running()) {
    for (const Block& block : sequence->blocks) named.insert(block.id());
  }
  for (const SequenceTable::Ended& ended : state_.sequences.ended()) {
    for (const Block& block : ended.sequence->blocks) named.insert(block.id());
  }
  for (uint64_t id : reply.missing_blocks()) {
    if (named.contains(ToBlockId(id))) continue;
    return absl::InternalError(
        absl::StrCat("step ", plan.step, " misses block ", id, ", which the plan does not name"));
  }
  return absl::OkStatus();
}

UnansweredPlan Scheduler::TakeOldest() {
  UnansweredPlan plan = std::move(unanswered_.front());
  unanswered_.pop_front();
  for (const PlannedRow& row : plan.rows) {
    Sequence* sequence = state_.sequences.Find(row.id);
    if (sequence == nullptr) continue;
    sequence->unanswered_tokens -= row.num_tokens;
    sequence->unanswered_samples -= row.sample ? 1 : 0;
  }
  return plan;
}

std::vector<Event> Scheduler::PlanWithout(const v1::StepReply& reply, TimePoint now) {
  const UnansweredPlan plan = TakeOldest();
  answered_at_ = now;
  for (auto row = plan.rows.rbegin(); row != plan.rows.rend(); ++row) TakeBack(*row);
  absl::flat_hash_set<BlockId> missing;
  for (uint64_t id : reply.missing_blocks()) {
    missing.insert(ToBlockId(id));
    state_.blocks.index().Lost(ToBlockId(id));
  }
  std::vector<Event> events;
  const std::vector<Sequence*> running = state_.sequences.running();  // a copy: End changes it
  for (Sequence* sequence : running) {
    const auto lost = [&](const Block& block) { return missing.contains(block.id()); };
    if (std::none_of(sequence->blocks.begin(), sequence->blocks.end(), lost)) continue;
    OnRowError(*sequence,
               absl::DataLossError("a worker lost KV of this running request; send it again"), now,
               events);
  }
  state_.last_misfit = {};
  return events;
}

// The ranks did not carry out the row.
void Scheduler::TakeBack(const PlannedRow& row) {
  Sequence* sequence = state_.sequences.Find(row.id);
  if (sequence == nullptr) {
    if (row.starts) state_.sequences.UndoStartOfEnded(row.id);
    return;
  }
  sequence->GiveBackBlocks(row.blocks_before);
  if (row.starts) TakeBackStart(*sequence);
}

void Scheduler::TakeBackStart(Sequence& sequence) {
  state_.sequences.BackToQueue(sequence);
  if (sequence.preemptions > 0) return;
  sequence.cached_tokens = 0;
  sequence.admitted_at.reset();
}

void Scheduler::ApplyRow(const PlannedRow& row, const v1::RowResult& result, TimePoint now,
                         std::vector<Event>& events) {
  Sequence* sequence = state_.sequences.Find(row.id);
  if (sequence == nullptr) {  // ended while the step ran, or before
    ++state_.counters.rows_in_vain;
    return;
  }
  if (sequence->is_damaged) return;  // planned before that was known
  if (result.error_code() != 0) {
    OnRowError(*sequence, RowError(result), now, events);
    return;
  }
  const Sequence::RowKind kind = sequence->KindOfRow(row.starts);
  const bool is_first = kind == Sequence::RowKind::kFirst;
  if (is_first) state_.CountPrefix(*sequence);
  if (row.starts && (!is_first || sequence->resumed_tokens > 0)) {
    CountResumed(result.accounting());
  }
  const bool prefill = sequence->in_prefill();
  sequence->Account(result.accounting(), kind);
  sequence->computed += row.num_tokens;
  if (prefill) state_.ReportProgress(*sequence, events);
  if (row.score_end > row.score_begin) {
    sequence->scored = row.score_end;
    events.push_back(PromptLogprobsEvent{.id = sequence->spec.id,
                                         .logprobs = sequence->Scores(result.prompt_logprobs())});
  }
  if (row.observe) {
    events.push_back(SelectionEvent{.id = sequence->spec.id, .map = result.selections()});
  }
  if (row.sample) ApplyToken(*sequence, result, now, events);
}

// Damaged KV is computed again, once for every new token: else the cause is another.
void Scheduler::OnRowError(Sequence& sequence, const absl::Status& error, TimePoint now,
                           std::vector<Event>& events) {
  if (sequence.is_damaged) return;
  if (absl::IsDataLoss(error) && sequence.generated_at_damage != sequence.generated()) {
    sequence.is_damaged = true;
    sequence.generated_at_damage = sequence.generated();
    return;
  }
  events.push_back(End(sequence, error, v1::FINISH_REASON_UNSPECIFIED, Blocks::kDiscard, now));
}

void Scheduler::Observe(SequenceId id) {
  if (Sequence* const sequence = state_.sequences.Find(id); sequence != nullptr) {
    sequence->observe = true;
  }
}

void Scheduler::ReadElsewhere(SequenceId id, int64_t sealed_tokens) {
  Sequence* const sequence = state_.sequences.Find(id);
  if (sequence == nullptr || !sequence->read_elsewhere.has_value()) return;
  if (sealed_tokens <= *sequence->read_elsewhere) return;
  sequence->read_elsewhere = sealed_tokens;
  sequence->is_read_further = true;
}

void Scheduler::EndReadElsewhere(SequenceId id, Elsewhere how, TimePoint now) {
  Sequence* const sequence = state_.sequences.Find(id);
  if (sequence == nullptr || !sequence->read_elsewhere.has_value()) return;
  state_.sequences.EndReadElsewhere(*sequence, now);
  if (sequence->state != Sequence::State::kRestoring) return;
  sequence->is_read_further = true;
  if (how == Elsewhere::kRead) state_.restores.ExpectLastBlocks(*sequence, now);
}

void Scheduler::ApplyToken(Sequence& sequence, const v1::RowResult& result, TimePoint now,
                           std::vector<Event>& events) {
  const auto token = static_cast<int32_t>(result.token_id());
  const int64_t index = sequence.generated();
  sequence.tokens.push_back(token);
  sequence.last_token_at = now;
  if (!sequence.first_token_at.has_value()) {
    sequence.first_token_at = now;
    ++state_.prompts_read;
  }
  TokenEvent event = {.id = sequence.spec.id, .index = index, .token = token};
  event.attention = sequence.AttentionUntilNow();
  if (sequence.spec.sampling.has_logprobs()) event.logprobs = result.logprobs();
  if (index >= int64_t{sequence.spec.sampling.min_tokens()} && sequence.IsStopToken(token)) {
    event.role = TokenEvent::Role::kStop;
    sequence.matched_stop_token = static_cast<uint32_t>(token);
  } else if (sequence.generated() == sequence.spec.max_tokens) {
    event.role = TokenEvent::Role::kLast;
  }
  events.push_back(event);
  if (event.role == TokenEvent::Role::kInner) return;
  const bool stop = event.role == TokenEvent::Role::kStop;
  events.push_back(End(sequence, absl::OkStatus(),
                       stop ? v1::FINISH_REASON_STOP : v1::FINISH_REASON_LENGTH, Blocks::kKeep,
                       now));
}

void Scheduler::CountResumed(const v1::RowAccounting& found) {
  if (found.cached_disk_tokens() > 0) {
    ++state_.counters.resumed_disk;
  } else if (found.cached_peer_tokens() > 0) {
    ++state_.counters.resumed_peer;
  } else if (found.cached_device_tokens() + found.cached_host_tokens() > 0) {
    ++state_.counters.resumed_host;
  } else {
    ++state_.counters.resumed_recompute;
  }
}

}  // namespace kvasir::coordinator
