// Messages as JSON, with the names of their fields: any one, as contexts are shown, and the state
// of a server for `kvasir status --json` and the status page, the answers of GetServerInfo and
// GetModelInfo. Pure functions: thread-safe.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "google/protobuf/message.h"

#include "proto/kvasir/v1/generation.pb.h"

namespace kvasir::coordinator {

// Returns one line. Fields that hold their default are there too. INTERNAL when protobuf cannot
// print the message.
absl::StatusOr<std::string> MessageJson(const google::protobuf::Message& message);

// Returns one line, an object with the members server and model. `model` is null while no worker
// group is formed. INTERNAL when protobuf cannot print them.
absl::StatusOr<std::string> StatusJson(const v1::GetServerInfoResponse& server,
                                       const v1::GetModelInfoResponse* model);

}  // namespace kvasir::coordinator
