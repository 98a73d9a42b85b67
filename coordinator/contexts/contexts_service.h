// kvasir.v1.Contexts over gRPC: hands calls to Contexts, on threads that serve no streams. Made by
// the server. Thread-safe.
#pragma once

#include "absl/time/time.h"
#include "grpcpp/support/server_callback.h"

#include "coordinator/contexts/contexts.h"
#include "coordinator/contexts/transfer_streams.h"
#include "coordinator/request/generation_api.h"
#include "proto/grpc_listener.h"
#include "proto/kvasir/v1/contexts.grpc.pb.h"

namespace kvasir::coordinator {

class ContextsService final : public v1::Contexts::CallbackService {
 public:
  // The references outlive the service.
  ContextsService(Contexts& contexts, GenerationApi& api, proto::GrpcListener& connections,
                  absl::Duration client_timeout)
      : contexts_(contexts),
        api_(api),
        connections_(connections),
        client_timeout_(client_timeout) {}

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
  grpc::ServerUnaryReactor* Pin(grpc::CallbackServerContext* context,
                                const v1::PinContextRequest* request,
                                v1::ContextHint* response) override;
  grpc::ServerUnaryReactor* Unpin(grpc::CallbackServerContext* context,
                                  const v1::UnpinContextRequest* request,
                                  v1::ContextHint* response) override;
  grpc::ServerUnaryReactor* Prefetch(grpc::CallbackServerContext* context,
                                     const v1::PrefetchContextRequest* request,
                                     v1::ContextHint* response) override;
  grpc::ServerUnaryReactor* Demote(grpc::CallbackServerContext* context,
                                   const v1::DemoteContextRequest* request,
                                   v1::ContextHint* response) override;
  grpc::ServerUnaryReactor* Evict(grpc::CallbackServerContext* context,
                                  const v1::EvictRequest* request,
                                  v1::EvictResponse* response) override;
  grpc::ServerWriteReactor<v1::ContextPart>* Export(
      grpc::CallbackServerContext* context, const v1::ExportContextRequest* request) override;
  grpc::ServerReadReactor<v1::ImportContextRequest>* Import(grpc::CallbackServerContext* context,
                                                            v1::Context* response) override;

 private:
  // Answers with what `call` gives for the request and who sends it: call(request, by, done).
  template <typename Request, typename Response, typename Call>
  grpc::ServerUnaryReactor* AnswerLater(grpc::CallbackServerContext* context,
                                        const Request& request, Response& response, Call call);
  // The same with a call that returns it: call(request, by).
  template <typename Request, typename Response, typename Call>
  grpc::ServerUnaryReactor* Answer(grpc::CallbackServerContext* context, const Request& request,
                                   Response& response, Call call);
  // Imports what the stream brings.
  absl::StatusOr<v1::Context> Receive(const Contexts::Transfer& transfer,
                                      const grpc::CallbackServerContext& context,
                                      std::shared_ptr<const Caller> caller, ImportStream& stream);

  Contexts& contexts_;
  GenerationApi& api_;
  proto::GrpcListener& connections_;
  const absl::Duration client_timeout_;
};

}  // namespace kvasir::coordinator
