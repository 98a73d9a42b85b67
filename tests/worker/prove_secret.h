// The coordinator's part of a worker's handshake over a synchronous stream, for tests that play the
// coordinator. Thread-compatible.
#pragma once

#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "grpcpp/support/sync_stream.h"

#include "proto/kvasir/v1/worker.pb.h"
#include "proto/security/group_handshake.h"

namespace kvasir::worker {

using CoordinatorEnd = grpc::ClientReaderWriter<v1::CoordinatorMessage, v1::WorkerMessage>;

// Proves `secret`, without one the empty secret. UNAVAILABLE when the worker ends the stream, whose
// Finish says why.
inline absl::Status ProveSecret(CoordinatorEnd& stream,
                                std::shared_ptr<const proto::GroupSecret> secret = nullptr) {
  if (secret == nullptr) secret = proto::GroupSecret::Read("").value();
  proto::CoordinatorHandshake handshake(std::move(secret));
  v1::WorkerMessage message;
  while (!handshake.done()) {
    if (!stream.Read(&message)) return absl::UnavailableError("the worker ended the stream");
    const absl::StatusOr<std::optional<v1::CoordinatorMessage>> answer =
        handshake.OnMessage(message);
    if (!answer.ok()) return answer.status();
    if (answer->has_value()) stream.Write(**answer);
  }
  return absl::OkStatus();
}

}  // namespace kvasir::worker
