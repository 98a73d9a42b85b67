// Parts that all calls of the HTTP API share. Thread-safe.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "nlohmann/json.hpp"

#include "coordinator/contexts/contexts.h"
#include "coordinator/http/transport/exchange.h"
#include "coordinator/request/generation_api.h"

namespace kvasir::coordinator {

// Outlives all calls.
struct HttpCallContext {
  GenerationApi& api;
  Contexts& contexts;
  std::function<absl::Status()> health;
  std::string model;              // the served name
  nlohmann::json tokenizer_info;  // the answer of /tokenizer_info
  absl::Time started;             // of the server
};

// NOT_FOUND for a model that is not served; an absent name is that of the served one.
absl::Status CheckModel(const HttpCallContext& context, const nlohmann::json& body);

}  // namespace kvasir::coordinator
