// kvasir.v1.Generation over gRPC: parses, submits, and ties the client's cancellation to the
// request. The engine loop and the request do the rest of Generate. The other calls are answered at
// once. Long texts are tokenized on separate threads (text_pool.h). Made by the server.
// Thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "grpcpp/support/server_callback.h"

#include "coordinator/engine_loop.h"
#include "coordinator/metrics/metrics.h"
#include "coordinator/model_folder.h"
#include "coordinator/policy/policy.h"
#include "coordinator/request/generate_stream.h"
#include "coordinator/request/request.h"
#include "coordinator/text_pool.h"
#include "coordinator/time/clock.h"
#include "coordinator/tokenizer/tokenizer.h"
#include "proto/grpc_listener.h"
#include "proto/kvasir/v1/config.pb.h"
#include "proto/kvasir/v1/generation.grpc.pb.h"

namespace kvasir::coordinator {

// Parts of the server that the service uses; they outlive it.
struct ServiceContext {
  const v1::ServeConfig& config;  // every name resolved
  const ModelFolder& folder;
  const Tokenizer& tokenizer;
  const PolicyTable& policies;
  EngineLoop& engine;
  Clock& clock;
  Metrics& metrics;
  proto::GrpcListener& connections;
  TextPool& texts;
  TimePoint started;
};

class GenerationService final : public v1::Generation::CallbackService {
 public:
  explicit GenerationService(const ServiceContext& context) : context_(context) {}

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
  // Tokenizes and submits the request of `stream`, or refuses it.
  void Begin(const v1::GenerateRequest& request, const std::shared_ptr<GenerateStream>& stream,
             TimePoint arrival);
  void Reject(GenerateStream& stream, const absl::Status& why);
  absl::StatusOr<std::unique_ptr<Request>> Accept(const v1::GenerateRequest& request,
                                                  const std::shared_ptr<GenerateStream>& stream,
                                                  TimePoint arrival);
  // Answers a call with the result of `work`, which runs on the pool when the request is long.
  grpc::ServerUnaryReactor* AnswerText(grpc::CallbackServerContext* context, size_t bytes,
                                       std::function<absl::Status()> work);

  const ServiceContext context_;
  RunningRequestIds ids_;
};

}  // namespace kvasir::coordinator
