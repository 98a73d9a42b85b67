// Checks text that the commands are given: in UTF-8, small enough for a request. Pure functions.
// Thread-safe.
#pragma once

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

#include "proto/kvasir/v1/generation.pb.h"

namespace kvasir::coordinator {

// Returns INVALID_ARGUMENT with the place of the first byte that is not UTF-8. `what` names the
// text.
absl::Status CheckUtf8(absl::string_view what, absl::string_view text);

// Returns INVALID_ARGUMENT for a request larger than a server takes. The message of gRPC would
// tell the author of a prompt nothing.
absl::Status CheckSize(const v1::GenerateRequest& request);

}  // namespace kvasir::coordinator
