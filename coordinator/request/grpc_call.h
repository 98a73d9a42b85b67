// Parts of a call that both gRPC services share: who sends it, the origin of its request, the
// answer of a unary one. Functions without state: thread-safe.
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
absl::StatusOr<std::shared_ptr<const Caller>> CallerOf(const grpc::CallbackServerContext& context,
                                                       GenerationApi& api);

// `caller` is null on a server without keys, and for a call that is about to be refused. Also puts
// the request's id into the initial metadata of the answer, `x-request-id`.
RequestOrigin OriginOfCall(grpc::CallbackServerContext& context, const v1::GenerateRequest& request,
                           std::shared_ptr<const Caller> caller, GenerationApi& api);

// Ends a unary call that has its answer, or an error.
grpc::ServerUnaryReactor* EndCall(grpc::CallbackServerContext* context, const absl::Status& status);

}  // namespace kvasir::coordinator
