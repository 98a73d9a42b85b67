// The half of the scheduler that hears what became of a plan.
#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"

#include "coordinator/scheduler.h"
#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

using kvstore::Block;

// What an earlier step counts in the prefill rate after one more step.
constexpr double kRateFade = 0.7;

absl::Status RowError(const v1::RowResult& result) {
  const auto code = static_cast<absl::StatusCode>(result.error_code());
  return absl::Status(code, absl::StrCat("a worker reports: ", result.error_message()));
}

}  // namespace

absl::StatusOr<std::vector<Event>> Scheduler::OnReply(const v1::StepReply& reply, TimePoint now) {
  KVASIR_RETURN_IF_ERROR(CheckReply(reply));
  if (!reply.missing_blocks().empty()) return PlanAgainWithout(reply, now);
  const Unanswered plan = TakeOldest();
  // A plan that was made ahead began with the answer to the one before.
  const TimePoint begun = std::max(plan.planned_at, std::exchange(answered_at_, now));
  const double seconds = absl::ToDoubleSeconds(Between(begun, now));
  if (plan.prefill_tokens > 0 && seconds > 0) {
    recent_prefill_tokens_ =
        kRateFade * recent_prefill_tokens_ + static_cast<double>(plan.prefill_tokens);
    recent_prefill_seconds_ = kRateFade * recent_prefill_seconds_ + seconds;
  }
  std::vector<Event> events;
  for (size_t i = 0; i < plan.rows.size(); ++i) {
    ApplyRow(plan.rows[i], reply.results(static_cast<int>(i)), now, events);
  }
  return events;
}

absl::Status Scheduler::CheckReply(const v1::StepReply& reply) const {
  const uint64_t step = unanswered_.empty() ? step_ : unanswered_.front().step;
  if (unanswered_.empty() || reply.group_epoch() != options_.group_epoch || reply.step() != step) {
    return absl::InternalError(absl::StrCat("a reply to step ", reply.step(), " of epoch ",
                                            reply.group_epoch(), " came in step ", step,
                                            " of epoch ", options_.group_epoch));
  }
  if (!reply.missing_blocks().empty()) return CheckMissing(reply);
  const std::vector<PlannedRow>& rows = unanswered_.front().rows;
  if (static_cast<size_t>(reply.results_size()) != rows.size()) {
    return absl::InternalError(absl::StrCat("step ", step, " has ", rows.size(), " rows and ",
                                            reply.results_size(), " results"));
  }
  for (int i = 0; i < reply.results_size(); ++i) {
    KVASIR_RETURN_IF_ERROR(CheckResult(step, rows[static_cast<size_t>(i)], reply.results(i)));
  }
  return absl::OkStatus();
}

absl::Status Scheduler::CheckResult(uint64_t step, const PlannedRow& row,
                                    const v1::RowResult& result) const {
  if (result.slot() != static_cast<uint32_t>(row.slot)) {
    return absl::InternalError(absl::StrCat("step ", step, " has a result for slot ", result.slot(),
                                            " in place of slot ", row.slot));
  }
  if (result.error_code() != 0) return absl::OkStatus();
  if (result.has_token_id() != row.sample ||
      (row.sample && result.token_id() >= static_cast<uint64_t>(options_.vocab_size))) {
    return absl::InternalError(absl::StrCat(
        "step ", step, " answers slot ", row.slot, " with ",
        result.has_token_id() ? absl::StrCat("token ", result.token_id()) : "no token", "; ",
        row.sample ? absl::StrCat("a token below ", options_.vocab_size) : "none", " was due"));
  }
  return absl::OkStatus();
}

// Every missing block must be one that the plan named: else planning again would change nothing.
absl::Status Scheduler::CheckMissing(const v1::StepReply& reply) const {
  const Unanswered& plan = unanswered_.front();
  if (unanswered_plans() > 1) {  // which then starts nothing: MayPlanAhead
    return absl::InternalError(absl::StrCat("step ", plan.step, " misses ",
                                            reply.missing_blocks_size(),
                                            " blocks, but does not start on any"));
  }
  absl::flat_hash_set<int64_t> named(plan.sealed.begin(), plan.sealed.end());
  for (const Sequence* sequence : running_) {
    for (const Block& block : sequence->blocks) named.insert(block.id().value);
  }
  for (const Retired& retired : retired_) {
    for (const Block& block : retired.sequence->blocks) named.insert(block.id().value);
  }
  for (uint64_t id : reply.missing_blocks()) {
    if (named.contains(static_cast<int64_t>(id))) continue;
    return absl::InternalError(
        absl::StrCat("step ", plan.step, " misses block ", id, ", which the plan does not name"));
  }
  return absl::OkStatus();
}

Scheduler::Unanswered Scheduler::TakeOldest() {
  Unanswered plan = std::move(unanswered_.front());
  unanswered_.pop_front();
  for (const PlannedRow& row : plan.rows) {
    Sequence* sequence = Find(row.id);
    if (sequence == nullptr) continue;
    sequence->unanswered_tokens -= row.num_tokens;
    sequence->unanswered_samples -= row.sample ? 1 : 0;
  }
  return plan;
}

std::vector<Event> Scheduler::PlanAgainWithout(const v1::StepReply& reply, TimePoint now) {
  const Unanswered plan = TakeOldest();
  answered_at_ = now;
  for (auto row = plan.rows.rbegin(); row != plan.rows.rend(); ++row) TakeBack(*row);
  absl::flat_hash_set<int64_t> missing;
  for (uint64_t id : reply.missing_blocks()) {
    missing.insert(static_cast<int64_t>(id));
    index_->Lost(BlockId(static_cast<int64_t>(id)));
  }
  std::vector<Event> events;
  const std::vector<Sequence*> running = running_;  // End changes running_
  for (Sequence* sequence : running) {
    const auto lost = [&](const Block& block) { return missing.contains(block.id().value); };
    if (std::none_of(sequence->blocks.begin(), sequence->blocks.end(), lost)) continue;
    events.push_back(End(
        *sequence, absl::DataLossError("a worker lost KV of this running request; send it again"),
        v1::FINISH_REASON_UNSPECIFIED, Blocks::kDiscard, now));
  }
  did_not_fit_ = SequenceId();
  return events;
}

// The ranks did not carry out the row.
void Scheduler::TakeBack(const PlannedRow& row) {
  Sequence* sequence = Find(row.id);
  if (sequence == nullptr) {
    if (!row.starts) return;
    for (Retired& retired : retired_) {  // ended meanwhile: there is no slot to free
      if (retired.sequence->spec.id == row.id) retired.sequence->slot = -1;
    }
    idle_slots_.push_back(row.slot);
    return;
  }
  sequence->GiveBackBlocks(row.blocks_before);
  if (row.starts) BackToQueue(*sequence);
}

void Scheduler::BackToQueue(Sequence& sequence) {
  running_.erase(std::find(running_.begin(), running_.end(), &sequence));
  waiting_.push_front(&sequence);
  idle_slots_.push_back(sequence.slot);
  sequence.slot = -1;
  sequence.reservation.Release();
  sequence.blocks.clear();
  sequence.hashes.clear();
  sequence.computed = 0;
  if (sequence.preemptions > 0) return;
  counters_.prefix_queries -= sequence.prompt_tokens;
  counters_.prefix_hits -= sequence.cached_tokens;
  sequence.cached_tokens = 0;
  sequence.admitted_at.reset();
}

void Scheduler::ApplyRow(const PlannedRow& row, const v1::RowResult& result, TimePoint now,
                         std::vector<Event>& events) {
  Sequence* sequence = Find(row.id);
  if (sequence == nullptr) {  // ended while the step ran, or before
    ++counters_.rows_in_vain;
    return;
  }
  if (result.error_code() != 0) {
    events.push_back(
        End(*sequence, RowError(result), v1::FINISH_REASON_UNSPECIFIED, Blocks::kDiscard, now));
    return;
  }
  if (row.starts && sequence->preemptions > 0) CountResumed(result.accounting());
  const bool prefill = sequence->in_prefill();
  sequence->Account(result.accounting(), row.starts && sequence->preemptions == 0);
  sequence->computed += row.num_tokens;
  if (prefill) ReportProgress(*sequence, events);
  if (row.sample) ApplyToken(*sequence, result, now, events);
}

void Scheduler::ApplyToken(Sequence& sequence, const v1::RowResult& result, TimePoint now,
                           std::vector<Event>& events) {
  const auto token = static_cast<int32_t>(result.token_id());
  const int64_t index = sequence.generated();
  sequence.tokens.push_back(token);
  sequence.last_token_at = now;
  if (!sequence.first_token_at.has_value()) {
    sequence.first_token_at = now;
    ++prompts_read_;
  }
  TokenEvent event = {.id = sequence.spec.id, .index = index, .token = token};
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

// A client that has seen tokens, or more of its prompt processed before it was preempted, hears
// nothing.
void Scheduler::ReportProgress(Sequence& sequence, std::vector<Event>& events) {
  if (sequence.generated() > 0 || sequence.computed < sequence.reported_tokens) return;
  sequence.reported_tokens = sequence.computed;
  events.push_back(Progress(sequence));
}

ProgressEvent Scheduler::Progress(const Sequence& sequence) const {
  ProgressEvent event = {.id = sequence.spec.id,
                         .prompt_tokens = sequence.prompt_tokens,
                         .processed_tokens = sequence.computed,
                         .cached_tokens = sequence.cached_tokens};
  if (recent_prefill_tokens_ <= 0) return event;
  int64_t ahead = 0;  // prompt tokens up to and including this sequence's
  for (const Sequence* running : running_) {
    ahead += std::max<int64_t>(0, running->prompt_tokens - running->computed);
    if (running == &sequence) break;
  }
  event.eta =
      absl::Seconds(static_cast<double>(ahead) * recent_prefill_seconds_ / recent_prefill_tokens_);
  return event;
}

}  // namespace kvasir::coordinator
