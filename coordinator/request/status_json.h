// The state of a server as JSON, for `kvasir status --json` and the status page: the answers of
// GetServerInfo and GetModelInfo, with the names of their fields. Pure functions: thread-safe.
#pragma once

#include <string>

#include "absl/status/statusor.h"

#include "proto/kvasir/v1/generation.pb.h"

namespace kvasir::coordinator {

// Returns one line, an object with the members server and model. `model` is null while no worker
// group is formed. INTERNAL when protobuf cannot print them.
absl::StatusOr<std::string> StatusJson(const v1::GetServerInfoResponse& server,
                                       const v1::GetModelInfoResponse* model);

}  // namespace kvasir::coordinator
