// Sees the calls of a gRPC port whose request cannot be read as their method's: gRPC ends them
// before any service knows of them. They get INVALID_ARGUMENT with the reason and a line in the
// log, as every other refusal. Given to the server's builder, which owns it. Thread-safe.
#pragma once

#include "grpcpp/support/server_interceptor.h"

#include "coordinator/request/generation_api.h"

namespace kvasir::coordinator {

class UnreadCalls final : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  // `api` outlives this object.
  explicit UnreadCalls(GenerationApi& api) : api_(api) {}

  grpc::experimental::Interceptor* CreateServerInterceptor(
      grpc::experimental::ServerRpcInfo* call) override;

 private:
  GenerationApi& api_;
};

}  // namespace kvasir::coordinator
