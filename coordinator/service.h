// kvasir.v1.Generation over gRPC: hands calls to the GenerationApi and ties the client's
// cancellation to its request. Made by the server. Thread-safe.
#pragma once

#include <cstddef>
#include <functional>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "grpcpp/support/server_callback.h"

#include "coordinator/request/generation_api.h"
#include "proto/grpc_listener.h"
#include "proto/kvasir/v1/generation.grpc.pb.h"

namespace kvasir::coordinator {

class GenerationService final : public v1::Generation::CallbackService {
 public:
  // The references outlive the service. A client that takes nothing for `client_timeout` is gone.
  GenerationService(GenerationApi& api, proto::GrpcListener& connections,
                    absl::Duration client_timeout)
      : api_(api), connections_(connections), client_timeout_(client_timeout) {}

  grpc::ServerWriteReactor<v1::GenerateResponse>* Generate(
      grpc::CallbackServerContext* context, const v1::GenerateRequest* request) override;
  grpc::ServerUnaryReactor* Tokenize(grpc::CallbackServerContext* context,
                                     const v1::TokenizeRequest* request,
                                     v1::TokenizeResponse* response) override;
  grpc::ServerUnaryReactor* Detokenize(grpc::CallbackServerContext* context,
                                       const v1::DetokenizeRequest* request,
                                       v1::DetokenizeResponse* response) override;
  grpc::ServerUnaryReactor* GetModelInfo(grpc::CallbackServerContext* context,
                                         const v1::GetModelInfoRequest* request,
                                         v1::GetModelInfoResponse* response) override;
  grpc::ServerUnaryReactor* GetServerInfo(grpc::CallbackServerContext* context,
                                          const v1::GetServerInfoRequest* request,
                                          v1::GetServerInfoResponse* response) override;

 private:
  // Answers a call with the result of `work`, which takes time in proportion to `bytes`.
  grpc::ServerUnaryReactor* AnswerText(grpc::CallbackServerContext* context, size_t bytes,
                                       std::function<absl::Status()> work);

  GenerationApi& api_;
  proto::GrpcListener& connections_;
  const absl::Duration client_timeout_;
};

}  // namespace kvasir::coordinator
