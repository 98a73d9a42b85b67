#include "proto/security/group_handshake.h"

#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"

namespace kvasir::proto {
namespace {

using Side = GroupSecret::Side;

}  // namespace

WorkerHandshake::WorkerHandshake(std::shared_ptr<const GroupSecret> secret)
    : secret_(std::move(secret)) {
  nonces_.worker = GroupSecret::NewNonce();
}

v1::WorkerMessage WorkerHandshake::Challenge() const {
  v1::WorkerMessage message;
  message.mutable_challenge()->set_nonce(nonces_.worker);
  return message;
}

absl::StatusOr<v1::WorkerMessage> WorkerHandshake::Answer(const v1::CoordinatorMessage& message) {
  if (!message.has_proof()) {
    return absl::FailedPreconditionError(
        "the first message of a stream must prove the group secret; run the same release on "
        "coordinator and workers");
  }
  nonces_.coordinator = message.proof().nonce();
  if (!secret_->Proves(Side::kCoordinator, nonces_, message.proof().proof())) {
    return absl::UnauthenticatedError(absl::StrCat(
        "the coordinator does not know the group secret of this worker, which ",
        secret_->empty() ? "has none" : "has one", "; give both the same --group-secret-file"));
  }
  v1::WorkerMessage answer;
  answer.mutable_proof()->set_proof(secret_->Proof(Side::kWorker, nonces_));
  return answer;
}

CoordinatorHandshake::CoordinatorHandshake(std::shared_ptr<const GroupSecret> secret)
    : secret_(std::move(secret)) {
  nonces_.coordinator = GroupSecret::NewNonce();
}

absl::StatusOr<std::optional<v1::CoordinatorMessage>> CoordinatorHandshake::OnMessage(
    const v1::WorkerMessage& message) {
  KVASIR_CHECK(!done_);
  if (nonces_.worker.empty() && message.has_challenge()) {
    nonces_.worker = message.challenge().nonce();
    if (nonces_.worker.size() != GroupSecret::kNonceBytes) {
      return absl::UnauthenticatedError(absl::StrCat("the worker's challenge has ",
                                                     nonces_.worker.size(), " bytes, not ",
                                                     GroupSecret::kNonceBytes));
    }
    v1::CoordinatorMessage answer;
    answer.mutable_proof()->set_nonce(nonces_.coordinator);
    answer.mutable_proof()->set_proof(secret_->Proof(Side::kCoordinator, nonces_));
    return answer;
  }
  if (!secret_->Proves(Side::kWorker, nonces_, message.proof().proof())) {
    return absl::UnauthenticatedError(
        "the worker does not prove that it knows the group secret; give both the same "
        "--group-secret-file and run the same release on both");
  }
  done_ = true;
  return std::optional<v1::CoordinatorMessage>();
}

}  // namespace kvasir::proto
