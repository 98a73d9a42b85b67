// Ids of a stream's events, and the stream that goes on after one of them. An id is the index of
// the event's last token, so that a client whose connection broke asks again with the header
// Last-Event-ID: the answer is computed again, and its events are sent from there on. That needs an
// answer that is the same each time. Pure function: thread-safe.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "coordinator/http/requests/generate_fields.h"
#include "coordinator/http/transport/exchange.h"
#include "proto/kvasir/v1/generation.pb.h"

namespace kvasir::coordinator {

struct EventIds {
  bool sent = false;
  int64_t told_tokens = 0;  // tokens that the client has, of which no event is sent
};

// INVALID_ARGUMENT when ids cannot name the events, or the answer cannot be told from one on.
absl::StatusOr<EventIds> ReadEventIds(const HttpRequest& http, const AnswerOptions& options,
                                      absl::Span<const v1::GenerateRequest> prompts);

}  // namespace kvasir::coordinator
