// Converts absl::Status to grpc::Status and back. The codes are the same numbers, so no table is
// needed. Payloads of an absl::Status travel as the details of the grpc::Status, by their type URL.
// Thread-safe.
#pragma once

#include <optional>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "grpcpp/support/status.h"

namespace kvasir::proto {

grpc::Status ToGrpcStatus(const absl::Status& status);
absl::Status FromGrpcStatus(const grpc::Status& status);

// Returns the same error with a google.rpc.RetryInfo: the client may try again after `delay`.
absl::Status WithRetryDelay(absl::Status status, absl::Duration delay);
// Returns the delay, or nothing when the status has none.
std::optional<absl::Duration> RetryDelay(const absl::Status& status);

}  // namespace kvasir::proto
