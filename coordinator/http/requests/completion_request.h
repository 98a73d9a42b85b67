// Turns the body of POST /v1/completions into GenerateRequests, one a prompt. Pure function:
// thread-safe.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"

#include "coordinator/http/requests/generate_fields.h"
#include "proto/kvasir/v1/generation.pb.h"

namespace kvasir::coordinator {

struct CompletionRequest {
  std::vector<v1::GenerateRequest> prompts;  // at least one; without ids
  AnswerOptions options;
  bool echo = false;  // the answer begins with the prompt
};

// INVALID_ARGUMENT, about the field, for wrong types and for what is not served.
absl::StatusOr<CompletionRequest> ParseCompletion(const nlohmann::json& body);

}  // namespace kvasir::coordinator
