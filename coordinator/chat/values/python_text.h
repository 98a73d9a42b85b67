// Writes values as Python does: str(), repr() and json.dumps(), whose texts are what the models
// were trained on. Marks of client text stay: a text that is written as it is keeps its own. Called
// by the template engine. Pure functions.
#pragma once

#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "coordinator/chat/values/budget.h"
#include "coordinator/chat/values/value.h"

namespace kvasir::coordinator {

// Returns the text that `{{ value }}` and `~` write: nothing for undefined.
absl::StatusOr<MarkedText> PythonText(const Value& value, Budget* budget);

struct JsonFormat {
  std::optional<int64_t> indent = {};
  std::optional<std::string> item_separator = {};  // [", ", or "," with indent]
  std::string key_separator = ": ";
  bool sorts_keys = false;
  bool ensures_ascii = false;
};
// Errors: INVALID_ARGUMENT for a value that JSON has no form for.
absl::StatusOr<MarkedText> JsonText(const Value& value, const JsonFormat& format, Budget* budget);

// The shortest decimal that reads as this number again, e.g. "0.1", "1.0", "1e+16".
std::string PythonReal(double value);
// Reads a whole decimal number; nullopt for anything else.
std::optional<double> ParseReal(absl::string_view text);

}  // namespace kvasir::coordinator
