#include "coordinator/scheduling/survivors.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace kvasir::coordinator {
namespace {

// True when the sequence has seen too many losses.
bool CountLossOf(Sequence& sequence) {
  if (!std::exchange(sequence.is_planned, false)) return false;  // it cannot be the cause
  // The furthest that it was ever read counts, so that reading the same again is no progress.
  const bool read =
      sequence.reported_tokens > std::exchange(sequence.reported_at_loss, sequence.reported_tokens);
  const bool generated =
      sequence.generated() > std::exchange(sequence.generated_at_loss, sequence.generated());
  sequence.losses = read || generated ? 0 : sequence.losses + 1;
  return sequence.losses >= Survivors::kMostLosses;
}

}  // namespace

std::vector<Event> Survivors::CountLoss(const absl::Status& why, TimePoint now) {
  // A client may try again unless the service itself is at fault.
  const absl::Status too_many(
      absl::IsInternal(why) ? absl::StatusCode::kInternal : absl::StatusCode::kUnavailable,
      absl::StrCat("the worker group was lost ", kMostLosses,
                   " times in a row while it computed this request, which got no further: the "
                   "request may be the cause; the last time: ",
                   why.message()));
  std::vector<Event> events;
  std::erase_if(sequences_, [&](const std::unique_ptr<Sequence>& sequence) {
    if (!CountLossOf(*sequence)) return false;
    events.emplace_back(End(*sequence, too_many, now));
    return true;
  });
  return events;
}

std::optional<FinishEvent> Survivors::Cancel(SequenceId id, const absl::Status& why,
                                             TimePoint now) {
  const auto it = std::find_if(
      sequences_.begin(), sequences_.end(),
      [id](const std::unique_ptr<Sequence>& sequence) { return sequence->spec.id == id; });
  if (it == sequences_.end()) return std::nullopt;
  FinishEvent event = End(**it, why, now);
  sequences_.erase(it);
  return event;
}

std::vector<Event> Survivors::EndAll(const absl::Status& why, TimePoint now) {
  std::vector<Event> events;
  for (const std::unique_ptr<Sequence>& sequence : TakeAll()) {
    events.emplace_back(End(*sequence, why, now));
  }
  return events;
}

SchedulerStats Survivors::stats() const {
  SchedulerStats stats;
  stats.waiting = std::ssize(sequences_);
  for (const std::unique_ptr<Sequence>& sequence : sequences_) {
    stats.waiting_tokens += sequence->prompt_tokens + sequence->resumed_tokens;
  }
  return stats;
}

FinishEvent Survivors::End(const Sequence& sequence, const absl::Status& why, TimePoint now) const {
  return {.id = sequence.spec.id,
          .status = why,
          .summary = sequence.Summary(v1::FINISH_REASON_UNSPECIFIED, unmeasured_, now)};
}

}  // namespace kvasir::coordinator
