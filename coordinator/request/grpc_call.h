// Parts of a call that the gRPC services share: who sends it, the origin of its request, the end
// of a unary one. Functions without state, and values: thread-safe.
#pragma once

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "grpcpp/server_context.h"
#include "grpcpp/support/server_callback.h"

#include "coordinator/request/generation_api.h"
#include "coordinator/request/request_origin.h"
#include "coordinator/security/caller.h"
#include "proto/kvasir/v1/generation.pb.h"

namespace kvasir::coordinator {

// Returns whose key the call has; null on a server without keys. UNAUTHENTICATED.
absl::StatusOr<std::shared_ptr<const Caller>> CallerOf(const grpc::ServerContextBase& context,
                                                       GenerationApi& api);

// `caller` is null on a server without keys, and for a call that is about to be refused. Also puts
// the request's id into the initial metadata of the answer, `x-request-id`.
RequestOrigin OriginOfCall(grpc::ServerContextBase& context, const v1::GenerateRequest& request,
                           std::shared_ptr<const Caller> caller, GenerationApi& api);

// A unary call. It ends once, by End; one that is refused leaves a line in the log.
class UnaryCall {
 public:
  // `api` outlives the call.
  UnaryCall(grpc::CallbackServerContext& context, GenerationApi& api);

  // UNAUTHENTICATED when the call has no key of a server that has keys.
  const absl::Status& known() const { return known_; }
  // The owner of its key; null on a server without keys.
  const std::shared_ptr<const Caller>& caller() const { return origin_.caller; }
  // For gRPC, which is given it before the call ends.
  grpc::ServerUnaryReactor* reactor() const { return reactor_; }
  // The response is filled when `status` is OK. Returns the reactor.
  grpc::ServerUnaryReactor* End(const absl::Status& status) const;

 private:
  absl::Status known_;
  RequestOrigin origin_;
  grpc::ServerUnaryReactor* reactor_;
};

}  // namespace kvasir::coordinator
