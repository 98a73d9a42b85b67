// The origin of a request that comes over gRPC, from the metadata of its call. Called by the gRPC
// services. Thread-safe.
#pragma once

#include "grpcpp/server_context.h"

#include "coordinator/request/generation_api.h"
#include "coordinator/request/request_origin.h"
#include "proto/kvasir/v1/generation.pb.h"

namespace kvasir::coordinator {

// Also puts the request's id into the initial metadata of the answer, `x-request-id`.
RequestOrigin OriginOfCall(grpc::CallbackServerContext& context, const v1::GenerateRequest& request,
                           GenerationApi& api);

}  // namespace kvasir::coordinator
