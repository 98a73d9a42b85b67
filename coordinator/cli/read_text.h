// Reads and checks text that the commands are given: whole, in UTF-8, small enough for a request.
// Pure functions, except that they read files. Thread-safe.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "proto/kvasir/v1/generation.pb.h"

namespace kvasir::coordinator {

// Returns the content of a file; `flag` names it in errors. NOT_FOUND when it cannot be opened,
// INVALID_ARGUMENT for a folder and for anything that cannot be read to its end.
absl::StatusOr<std::string> ReadFile(absl::string_view flag, const std::string& path);
absl::StatusOr<std::string> ReadStandardInput();

// Returns INVALID_ARGUMENT with the place of the first byte that is not UTF-8. `what` names the
// text.
absl::Status CheckUtf8(absl::string_view what, absl::string_view text);

// Returns INVALID_ARGUMENT for a request larger than a server takes. The message of gRPC would
// tell the author of a prompt nothing.
absl::Status CheckSize(const v1::GenerateRequest& request);

}  // namespace kvasir::coordinator
