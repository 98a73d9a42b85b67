#include "coordinator/live_requests.h"

#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"

namespace kvasir::coordinator {

void LiveRequests::Add(std::unique_ptr<Request> request) {
  const SequenceId id = request->sequence();
  requests_.emplace(id, std::move(request));
}

std::optional<SequenceId> LiveRequests::OnEvent(Event event, TimePoint now) {
  if (const auto* progress = std::get_if<ProgressEvent>(&event)) {
    requests_.at(progress->id)->OnProgress(*progress, now);
  } else if (auto* scores = std::get_if<PromptLogprobsEvent>(&event)) {
    requests_.at(scores->id)->OnPromptLogprobs(std::move(*scores));
  } else if (auto* selection = std::get_if<SelectionEvent>(&event)) {
    requests_.at(selection->id)->OnSelections(std::move(selection->map), now);
  } else if (const auto* token = std::get_if<TokenEvent>(&event)) {
    if (requests_.at(token->id)->OnToken(*token, now) == Request::Verdict::kStop) return token->id;
  } else {
    auto& finish = std::get<FinishEvent>(event);
    const auto it = requests_.find(finish.id);
    it->second->Finish(finish.status, std::move(finish.summary), now);
    requests_.erase(it);
    on_end_();
  }
  return std::nullopt;
}

void LiveRequests::OnGroupLost() {
  for (const auto& [id, request] : requests_) request->OnGroupLost();
}

std::vector<SequenceId> LiveRequests::Overdue(TimePoint now) const {
  std::vector<SequenceId> overdue;
  for (const auto& [id, request] : requests_) {
    if (Between(request->arrival(), now) > longest_) overdue.push_back(id);
  }
  return overdue;
}

absl::Status LiveRequests::TooLate() const {
  return absl::DeadlineExceededError(absl::StrCat("the request is not done after ",
                                                  absl::FormatDuration(longest_),
                                                  ", this server's --max-request-time"));
}

std::optional<TimePoint> LiveRequests::NextOverdue() const {
  std::optional<TimePoint> next;
  for (const auto& [id, request] : requests_) {
    next = Earlier(next, After(request->arrival(), longest_ + absl::Nanoseconds(1)));
  }
  return next;
}

}  // namespace kvasir::coordinator
