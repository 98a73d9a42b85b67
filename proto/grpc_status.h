// absl::Status <-> grpc::Status: the codes are the same numbers, so the one table is the identity.
// Payloads of an absl::Status travel as the details of the grpc::Status, by their type URL.
// Thread-safe.
#pragma once

#include <optional>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "grpcpp/support/status.h"

namespace kvasir::proto {

grpc::Status ToGrpcStatus(const absl::Status& status);
absl::Status FromGrpcStatus(const grpc::Status& status);

// The same error, with a google.rpc.RetryInfo: the client may try again after `delay`.
absl::Status WithRetryDelay(absl::Status status, absl::Duration delay);
// Nothing when the status says nothing about it.
std::optional<absl::Duration> RetryDelay(const absl::Status& status);

}  // namespace kvasir::proto
