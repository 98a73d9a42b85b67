// The header x-request-id. Pure functions: thread-safe.
#pragma once

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace kvasir::coordinator {

// INVALID_ARGUMENT for an id that is too long for a line of the log, or could be taken for more
// than one word of it.
absl::Status CheckRequestId(absl::string_view id);

}  // namespace kvasir::coordinator
