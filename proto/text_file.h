// Reads a file that a flag names, or standard input, to its end. Files of configuration go through
// here before a parser sees them: what cannot be read is a Status, where a parser's own reading
// throws. Pure functions, except that they read. Thread-safe.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kvasir::proto {

// Returns the content of a file or a pipe; `flag` names it in errors. NOT_FOUND when it cannot be
// opened, INVALID_ARGUMENT for a folder and for anything that cannot be read to its end.
absl::StatusOr<std::string> ReadTextFile(absl::string_view flag, const std::string& path);
absl::StatusOr<std::string> ReadStandardInput();

}  // namespace kvasir::proto
