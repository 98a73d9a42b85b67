// Parses a chat template: the subset of Jinja that chat templates use. Statements: if, for, set,
// macro, break, continue, raw, generation (whose body is taken as it is). Called by
// ChatTemplate. Pure function.
#pragma once

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "coordinator/chat/parsing/syntax.h"

namespace kvasir::coordinator {

// Errors: INVALID_ARGUMENT with the line, for what is not Jinja or not in the subset.
// REQUIRES: `source` is well-formed UTF-8.
absl::StatusOr<Statements> ParseTemplate(absl::string_view source);

}  // namespace kvasir::coordinator
