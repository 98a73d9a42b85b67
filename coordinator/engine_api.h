// GenerationApi over the engine loop: the one place where requests of all transports are accepted
// and refused. Long texts are tokenized on separate threads (text_pool.h). Made by the server.
// Thread-safe.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "coordinator/engine_loop.h"
#include "coordinator/metrics/metrics.h"
#include "coordinator/model_folder.h"
#include "coordinator/policy/policy.h"
#include "coordinator/request/generation_api.h"
#include "coordinator/request/request.h"
#include "coordinator/request/request_trace.h"
#include "coordinator/request/running_requests.h"
#include "coordinator/security/api_keys.h"
#include "coordinator/text_pool.h"
#include "coordinator/time/clock.h"
#include "coordinator/tokenizer/tokenizer.h"
#include "proto/kvasir/v1/config.pb.h"

namespace kvasir::coordinator {

// Parts of the server that the API uses; they outlive it.
struct EngineApiContext {
  const v1::ServeConfig& config;  // every name resolved
  const ModelFolder& folder;
  const Tokenizer& tokenizer;
  const PolicyTable& policies;
  EngineLoop& engine;
  Clock& clock;
  Metrics& metrics;
  TextPool& texts;
  const ApiKeys* keys = nullptr;          // null: whoever reaches the server may ask
  const RequestTracer* tracer = nullptr;  // null: requests are not traced
  TimePoint started;
};

class EngineApi final : public GenerationApi {
 public:
  explicit EngineApi(const EngineApiContext& context) : context_(context) {}

  absl::StatusOr<std::shared_ptr<const Caller>> Authenticate(
      absl::string_view authorization) override;
  absl::Status RunText(size_t bytes, std::function<void()> work) override {
    return context_.texts.Run(bytes, std::move(work));
  }
  void Generate(const v1::GenerateRequest& request, const RequestOrigin& origin,
                const std::shared_ptr<ClientSink>& sink) override;
  void Refuse(const RequestOrigin& origin, ClientSink& sink, const absl::Status& why) override;
  std::string NewRequestId() override;
  TimePoint Now() const override { return context_.clock.Now(); }
  absl::StatusOr<v1::TokenizeResponse> Tokenize(const v1::TokenizeRequest& request) override;
  absl::StatusOr<v1::DetokenizeResponse> Detokenize(const v1::DetokenizeRequest& request) override;
  absl::StatusOr<v1::GetModelInfoResponse> ModelInfo() override;
  v1::GetServerInfoResponse ServerInfo(const v1::GetServerInfoRequest& request) override;
  absl::StatusOr<Selections> Observe(const std::string& request_id) override;
  const Tokenizer& tokenizer() const override { return context_.tokenizer; }

 private:
  absl::StatusOr<std::unique_ptr<Request>> Accept(const v1::GenerateRequest& request,
                                                  const RequestOrigin& origin,
                                                  const std::shared_ptr<ClientSink>& sink);

  const EngineApiContext context_;
  RunningRequests running_;
};

}  // namespace kvasir::coordinator
