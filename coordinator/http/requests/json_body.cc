#include "coordinator/http/requests/json_body.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"

#include "coordinator/tokenizer/json_value.h"
#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

using nlohmann::json;

// Four million token ids, more than a body of 64 MiB has of words.
constexpr JsonLimits kBodyLimits = {.max_values = 1 << 22, .max_keys = 4096, .max_depth = 32};

// Returns the end of the string that begins at `at`, a quotation mark.
size_t EndOfString(absl::string_view text, size_t at) {
  for (++at; text[at] != '"'; ++at) {
    if (text[at] == '\\') ++at;
  }
  return at + 1;
}

// Returns the end of the value within an object that begins at `at`: the place of the comma or
// brace after it.
size_t EndOfValue(absl::string_view text, size_t at) {
  int depth = 0;
  while (depth > 0 || (text[at] != ',' && text[at] != '}')) {
    if (text[at] == '"') {
      at = EndOfString(text, at);
      continue;
    }
    if (text[at] == '{' || text[at] == '[') ++depth;
    if (text[at] == '}' || text[at] == ']') --depth;
    ++at;
  }
  return at;
}

}  // namespace

// The text was parsed, so every string, object and array in it ends.
absl::string_view JsonBody::MemberText(absl::string_view name) const {
  const auto member = object.find(std::string(name));
  if (member == object.end() || member->is_null()) return {};
  const absl::string_view whole = text;
  size_t at = whole.find('{') + 1;
  while (true) {
    const size_t key = whole.find('"', at);
    const size_t key_end = EndOfString(whole, key);
    const size_t value = whole.find(':', key_end) + 1;
    const size_t end = EndOfValue(whole, value);
    const json key_text = json::parse(whole.substr(key, key_end - key));
    if (key_text.get_ref<const std::string&>() == name) {
      return absl::StripAsciiWhitespace(whole.substr(value, end - value));
    }
    at = end + 1;
  }
}

absl::StatusOr<JsonBody> ParseBody(std::string text) {
  KVASIR_ASSIGN_OR_RETURN(json object, ParseJson(text, kBodyLimits));
  if (!object.is_object()) return absl::InvalidArgumentError("the body is not a JSON object");
  return JsonBody{.text = std::move(text), .object = std::move(object)};
}

}  // namespace kvasir::coordinator
