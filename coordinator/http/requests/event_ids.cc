#include "coordinator/http/requests/event_ids.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace kvasir::coordinator {
namespace {

constexpr char kAskAgain[] = "; ask again without the header Last-Event-ID";

}  // namespace

absl::StatusOr<EventIds> ReadEventIds(const HttpRequest& http, const AnswerOptions& options,
                                      absl::Span<const v1::GenerateRequest> prompts) {
  const bool resumes = !http.last_event_id.empty();
  EventIds ids = {.sent = resumes || options.event_ids};
  if (!ids.sent) return ids;
  if (!options.stream || options.n != 1 || prompts.size() != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat(resumes ? "the header Last-Event-ID" : "stream_options.event_ids",
                     ": events have ids in the stream of one answer; set stream, send one prompt, "
                     "leave n at 1"));
  }
  if (!resumes) return ids;
  uint32_t last = 0;
  if (!absl::SimpleAtoi(http.last_event_id, &last)) {
    return absl::InvalidArgumentError(
        absl::StrCat("the header Last-Event-ID is '", http.last_event_id.substr(0, 64),
                     "'; expected the id of an event of this answer"));
  }
  const v1::SamplingParams& sampling = prompts.front().sampling();
  const bool draws = !sampling.has_temperature() || sampling.temperature() != 0;
  if (draws && !sampling.has_seed()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "temperature is not 0 and seed is not set, so that the answer would not be the "
        "one that event ",
        last, " is of", kAskAgain));
  }
  ids.told_tokens = int64_t{last} + 1;
  return ids;
}

}  // namespace kvasir::coordinator
