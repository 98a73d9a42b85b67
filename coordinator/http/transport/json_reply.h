// Answers in JSON. Functions without state: thread-safe.
#pragma once

#include <string>

#include "nlohmann/json.hpp"

#include "coordinator/http/transport/exchange.h"

namespace kvasir::coordinator {

// Returns the JSON as text; bytes that are not UTF-8 become U+FFFD.
std::string ToText(const nlohmann::json& value);
void ReplyJson(Exchange& exchange, const nlohmann::json& answer);

}  // namespace kvasir::coordinator
