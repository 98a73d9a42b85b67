// String literals of Jinja: Python's escapes (\n, \', \x41, \u00e9, octal). Called by the lexer.
// Pure function.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kvasir::coordinator {

// Returns what `literal`, the text between the quotes, stands for. An unknown escape stays as it
// is. INVALID_ARGUMENT for a code point that is cut off or does not exist.
absl::StatusOr<std::string> UnescapeLiteral(absl::string_view literal);

}  // namespace kvasir::coordinator
