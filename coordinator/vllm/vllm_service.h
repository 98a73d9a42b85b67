// vllm.grpc.engine.VllmEngine over gRPC: translates calls to the GenerationApi and its answers
// back (vllm_request.h, vllm_answer.h), and knows running requests by their id, for Abort. Made by
// the server, beside kvasir.v1.Generation. Thread-safe.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/time/time.h"
#include "grpcpp/support/server_callback.h"

#include "coordinator/request/generate_stream.h"
#include "coordinator/request/generation_api.h"
#include "kernels/base/mutex.h"
#include "proto/grpc_listener.h"
#include "proto/vllm/grpc/vllm_engine.grpc.pb.h"

namespace kvasir::coordinator {

class VllmService final : public ::vllm::grpc::engine::VllmEngine::CallbackService {
 public:
  // The references outlive the service. A client that takes nothing for `client_timeout` is gone.
  VllmService(GenerationApi& api, proto::GrpcListener& connections, absl::Duration client_timeout)
      : api_(api), connections_(connections), client_timeout_(client_timeout) {}

  grpc::ServerWriteReactor<::vllm::grpc::engine::GenerateResponse>* Generate(
      grpc::CallbackServerContext* context,
      const ::vllm::grpc::engine::GenerateRequest* request) override;
  grpc::ServerUnaryReactor* Embed(grpc::CallbackServerContext* context,
                                  const ::vllm::grpc::engine::EmbedRequest* request,
                                  ::vllm::grpc::engine::EmbedResponse* response) override;
  grpc::ServerUnaryReactor* HealthCheck(
      grpc::CallbackServerContext* context, const ::vllm::grpc::engine::HealthCheckRequest* request,
      ::vllm::grpc::engine::HealthCheckResponse* response) override;
  grpc::ServerUnaryReactor* Abort(grpc::CallbackServerContext* context,
                                  const ::vllm::grpc::engine::AbortRequest* request,
                                  ::vllm::grpc::engine::AbortResponse* response) override;
  grpc::ServerUnaryReactor* GetModelInfo(
      grpc::CallbackServerContext* context,
      const ::vllm::grpc::engine::GetModelInfoRequest* request,
      ::vllm::grpc::engine::GetModelInfoResponse* response) override;
  grpc::ServerUnaryReactor* GetServerInfo(
      grpc::CallbackServerContext* context,
      const ::vllm::grpc::engine::GetServerInfoRequest* request,
      ::vllm::grpc::engine::GetServerInfoResponse* response) override;

 private:
  using Stream = AnswerStream<::vllm::grpc::engine::GenerateResponse>;

  // Translates and submits the request of `stream`, or refuses it.
  void Begin(const ::vllm::grpc::engine::GenerateRequest& request, const RequestOrigin& origin,
             const std::shared_ptr<Stream>& stream);
  // Lets Abort find the stream. The first stream of an id counts, as the API refuses others.
  void Remember(const std::string& id, const std::shared_ptr<Stream>& stream) EXCLUDES(mu_);

  GenerationApi& api_;
  proto::GrpcListener& connections_;
  const absl::Duration client_timeout_;
  std::atomic<int64_t> received_at_ns_ = 0;  // Unix time of the last Generate

  kernels::Mutex mu_;
  // By request id. Streams that are gone are swept when there are twice as many entries as after
  // the last sweep.
  absl::flat_hash_map<std::string, std::weak_ptr<Stream>> streams_ GUARDED_BY(mu_);
  size_t sweep_at_ GUARDED_BY(mu_) = 64;
};

}  // namespace kvasir::coordinator
