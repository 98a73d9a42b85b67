// Who sends a request that comes over gRPC, and its origin, from the metadata of its call. Called
// by the gRPC services. Thread-safe.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "grpcpp/server_context.h"

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

}  // namespace kvasir::coordinator
