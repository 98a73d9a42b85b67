// JSON from untrusted files. The JSON library keeps the last of two equal keys, stops at a NUL byte
// and nests as deep as its input; here all three are errors. Called by the readers of config.json
// and of safetensors headers and indices. Functions without state.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include <nlohmann/json.hpp>

namespace kvasir::worker {

// INVALID_ARGUMENT when `text` is not one JSON value in UTF-8, an object has a key twice, or arrays
// and objects nest deeper than 16. `what` names the text in messages. Memory is at most about 50
// times the text: callers limit its size.
absl::StatusOr<nlohmann::json> ParseStrictJson(absl::string_view text, absl::string_view what);

// Feeds `text` to `handler` under the same rules, except that duplicate keys and depth are left to
// the handler. The result is OK when the handler stopped the parse (by returning false from an
// event): the handler knows why.
absl::Status ParseJsonEvents(absl::string_view text, absl::string_view what,
                             nlohmann::json_sax<nlohmann::json>& handler);

// Returns text from a file as messages show it: quoted, escaped, and cut when it is long.
std::string QuoteForMessage(absl::string_view text);
// The same for a JSON value.
std::string ValueForMessage(const nlohmann::json& value);

}  // namespace kvasir::worker
