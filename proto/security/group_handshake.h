// The first messages of a stream between coordinator and worker, at both ends: each proves to the
// other that it knows the group secret, before a plan or a stored block is told.
//
//   worker       -> Challenge{w}
//   coordinator  -> CoordinatorProof{c, HMAC(secret, "kvasir coordinator:" w c)}
//   worker       -> WorkerProof{HMAC(secret, "kvasir worker:" w c)}
//
// w and c are 32 random bytes, new for every stream: a recorded stream proves nothing later. The
// proof is not bound to the stream: without TLS (proto/security/tls.h) whoever sits between the two
// ends can pass the proofs on and read. Thread-compatible.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"

#include "proto/kvasir/v1/worker.pb.h"
#include "proto/security/group_secret.h"

namespace kvasir::proto {

class WorkerHandshake {
 public:
  explicit WorkerHandshake(std::shared_ptr<const GroupSecret> secret);

  // Returns the first message of the stream.
  v1::WorkerMessage Challenge() const;
  // Takes the first message of the coordinator. Returns the worker's proof; UNAUTHENTICATED when
  // the message does not prove the secret, FAILED_PRECONDITION when it is no proof at all.
  absl::StatusOr<v1::WorkerMessage> Answer(const v1::CoordinatorMessage& message);

 private:
  const std::shared_ptr<const GroupSecret> secret_;
  GroupSecret::Nonces nonces_;
};

class CoordinatorHandshake {
 public:
  explicit CoordinatorHandshake(std::shared_ptr<const GroupSecret> secret);

  // Returns true when the worker has proven the secret: from now on messages are the group's.
  bool done() const { return done_; }
  // Takes a message of the worker. Returns the message to send, if there is one; UNAUTHENTICATED
  // when the worker does not prove the secret. REQUIRES: not done.
  absl::StatusOr<std::optional<v1::CoordinatorMessage>> OnMessage(const v1::WorkerMessage& message);

 private:
  const std::shared_ptr<const GroupSecret> secret_;
  GroupSecret::Nonces nonces_;
  bool done_ = false;
};

}  // namespace kvasir::proto
