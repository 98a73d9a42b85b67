// Parts that all calls of the HTTP API share. Thread-safe.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "nlohmann/json.hpp"

#include "coordinator/http/transport/exchange.h"
#include "coordinator/request/generation_api.h"

namespace kvasir::coordinator {

// Outlives all calls.
struct HttpCallContext {
  GenerationApi& api;
  std::function<absl::Status()> health;
  std::string model;              // the served name
  nlohmann::json tokenizer_info;  // the answer of /tokenizer_info
  absl::Time started;             // of the server
};

// Returns the JSON as text; bytes that are not UTF-8 become U+FFFD.
std::string ToText(const nlohmann::json& value);
// Answers with the JSON, or with the error.
void ReplyJson(Exchange& exchange, const absl::StatusOr<nlohmann::json>& answer);

// Parses the body of a request within limits on depth, number of values and keys. INVALID_ARGUMENT
// for what is not a JSON object.
absl::StatusOr<nlohmann::json> ParseBody(const std::string& body);
// NOT_FOUND for a model that is not served; an absent name is that of the served one.
absl::Status CheckModel(const HttpCallContext& context, const nlohmann::json& body);

}  // namespace kvasir::coordinator
