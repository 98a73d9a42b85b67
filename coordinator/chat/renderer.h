// Runs the statements of a parsed template over a conversation. Called by ChatTemplate. Pure
// function.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "coordinator/chat/parsing/syntax.h"
#include "coordinator/chat/values/budget.h"
#include "coordinator/chat/values/marked_text.h"

namespace kvasir::coordinator {

// Returns the text. Errors: INVALID_ARGUMENT, with the text of raise_exception where the template
// calls it, and otherwise with the line.
absl::StatusOr<MarkedText> RenderStatements(const Statements& statements,
                                            std::vector<std::pair<std::string, Value>> variables,
                                            absl::Time now, Budget* budget);

}  // namespace kvasir::coordinator
