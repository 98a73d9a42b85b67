// Refuses the calls of a gRPC port that none of its services has, with the reason and a line in the
// log, where gRPC itself would say nothing. Made by the server. Thread-safe.
#pragma once

#include "grpcpp/generic/async_generic_service.h"

#include "coordinator/request/generation_api.h"

namespace kvasir::coordinator {

class UnknownCalls final : public grpc::CallbackGenericService {
 public:
  // `api` outlives this object.
  explicit UnknownCalls(GenerationApi& api) : api_(api) {}

  grpc::ServerGenericBidiReactor* CreateReactor(
      grpc::GenericCallbackServerContext* context) override;

 private:
  GenerationApi& api_;
};

}  // namespace kvasir::coordinator
