// kvasir.v1.Generation over gRPC: parses, submits, and ties the client's cancellation to the
// request. Everything else happens in the engine loop and in the request. Made by the server.
// Thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "grpcpp/support/server_callback.h"

#include "coordinator/clock.h"
#include "coordinator/engine_loop.h"
#include "coordinator/generate_stream.h"
#include "coordinator/metrics.h"
#include "coordinator/policy.h"
#include "coordinator/request.h"
#include "coordinator/tokenizer/tokenizer.h"
#include "proto/kvasir/v1/generation.grpc.pb.h"

namespace kvasir::coordinator {

// What outlives the service.
struct ServiceContext {
  const Tokenizer& tokenizer;
  const PolicyTable& policies;
  const std::vector<int32_t>& eos_token_ids;
  EngineLoop& engine;
  Clock& clock;
  Metrics& metrics;
};

class GenerationService final : public v1::Generation::CallbackService {
 public:
  explicit GenerationService(const ServiceContext& context) : context_(context) {}

  grpc::ServerWriteReactor<v1::GenerateResponse>* Generate(
      grpc::CallbackServerContext* context, const v1::GenerateRequest* request) override;

 private:
  absl::StatusOr<std::unique_ptr<Request>> Accept(const v1::GenerateRequest& request,
                                                  const std::shared_ptr<GenerateStream>& stream);

  const ServiceContext context_;
  RunningRequestIds ids_;
};

}  // namespace kvasir::coordinator
