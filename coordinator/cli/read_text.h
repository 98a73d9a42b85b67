// Text from outside as the commands take it: whole, in UTF-8, and small enough for a request. Pure
// but for reading files. Thread-safe.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "proto/kvasir/v1/generation.pb.h"

namespace kvasir::coordinator {

// All that a file holds; `flag` names it in errors. NOT_FOUND when it cannot be opened,
// INVALID_ARGUMENT for a folder, or what else cannot be read to its end.
absl::StatusOr<std::string> ReadFile(absl::string_view flag, const std::string& path);
absl::StatusOr<std::string> ReadStandardInput();

// INVALID_ARGUMENT with the place of the first byte that is not UTF-8. `what` names the text.
absl::Status CheckUtf8(absl::string_view what, absl::string_view text);

// INVALID_ARGUMENT for a request that no server would take: gRPC's own words say nothing to whoever
// wrote a prompt.
absl::Status CheckSize(const v1::GenerateRequest& request);

}  // namespace kvasir::coordinator
