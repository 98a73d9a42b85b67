// kvasir.v1.Contexts over gRPC: hands calls to Contexts, on threads that serve no streams. Made by
// the server. Thread-safe.
#pragma once

#include "grpcpp/support/server_callback.h"

#include "coordinator/contexts/contexts.h"
#include "coordinator/request/generation_api.h"
#include "proto/grpc_listener.h"
#include "proto/kvasir/v1/contexts.grpc.pb.h"

namespace kvasir::coordinator {

class ContextsService final : public v1::Contexts::CallbackService {
 public:
  // The references outlive the service.
  ContextsService(Contexts& contexts, GenerationApi& api, proto::GrpcListener& connections)
      : contexts_(contexts), api_(api), connections_(connections) {}

  grpc::ServerUnaryReactor* Create(grpc::CallbackServerContext* context,
                                   const v1::CreateContextRequest* request,
                                   v1::Context* response) override;
  grpc::ServerUnaryReactor* Fork(grpc::CallbackServerContext* context,
                                 const v1::ForkContextRequest* request,
                                 v1::Context* response) override;
  grpc::ServerUnaryReactor* Get(grpc::CallbackServerContext* context,
                                const v1::GetContextRequest* request,
                                v1::Context* response) override;
  grpc::ServerUnaryReactor* List(grpc::CallbackServerContext* context,
                                 const v1::ListContextsRequest* request,
                                 v1::ListContextsResponse* response) override;
  grpc::ServerUnaryReactor* Delete(grpc::CallbackServerContext* context,
                                   const v1::DeleteContextRequest* request,
                                   v1::DeleteContextResponse* response) override;

 private:
  // Answers with what `call` returns for the request and who sends it.
  template <typename Request, typename Response, typename Call>
  grpc::ServerUnaryReactor* Answer(grpc::CallbackServerContext* context, const Request& request,
                                   Response& response, Call call);

  Contexts& contexts_;
  GenerationApi& api_;
  proto::GrpcListener& connections_;
};

}  // namespace kvasir::coordinator
