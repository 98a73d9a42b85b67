// The body of an HTTP request, as values and as the text that the client wrote. Function without
// state: thread-safe.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"

namespace kvasir::coordinator {

struct JsonBody {
  std::string text;
  nlohmann::json object;

  // Returns the text of a member's value: unlike the value it has the keys in the client's order,
  // which chat templates print. Empty when the member is absent or null.
  absl::string_view MemberText(absl::string_view name) const;
};

// Parses the body within limits on depth, number of values and keys. INVALID_ARGUMENT for what is
// not a JSON object.
absl::StatusOr<JsonBody> ParseBody(std::string text);

}  // namespace kvasir::coordinator
