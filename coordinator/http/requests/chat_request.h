// Turns the body of POST /v1/chat/completions into a GenerateRequest. Pure function: thread-safe.
#pragma once

#include "absl/status/statusor.h"

#include "coordinator/http/requests/generate_fields.h"
#include "coordinator/http/requests/json_body.h"
#include "proto/kvasir/v1/generation.pb.h"

namespace kvasir::coordinator {

struct ChatRequest {
  // Its input is the conversation; without an id. max_tokens is unset unless the client sent it: an
  // answer may then fill the context.
  v1::GenerateRequest request;
  AnswerOptions options;
};

// INVALID_ARGUMENT, about the field, for wrong types and for what is not served.
absl::StatusOr<ChatRequest> ParseChat(const JsonBody& body);

}  // namespace kvasir::coordinator
